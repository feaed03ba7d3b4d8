"""A launcher for each rank of a step, which starts the rank again in seconds when any rank of the step has failed."""
