"""A launcher for each rank of a step, which restarts the rank in seconds after any rank of the step fails."""
