"""The controller: failure decisions, the requeue path, and the only code that speaks to Slurm."""
