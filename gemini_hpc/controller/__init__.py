"""The controller: failure decisions, the requeue path, and the only code that sends commands to Slurm."""
