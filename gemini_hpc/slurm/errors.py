"""Errors between this package and Slurm."""


class SlurmError(Exception):
    """The error that Slurm refuses a request; the text is Slurm's own."""


class UnknownJob(SlurmError):
    """The error that Slurm does not know this job, or no longer knows it."""


class SlurmUnreachable(SlurmError):
    """The error that slurmctld does not answer: its state is unknown, so no conclusion may be drawn."""
