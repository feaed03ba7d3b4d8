"""What goes wrong between this package and Slurm."""


class SlurmError(Exception):
    """Slurm said no; the message is its own."""


class UnknownJob(SlurmError):
    """Slurm does not know this job (any more)."""


class SlurmUnreachable(SlurmError):
    """No answer from slurmctld: nothing is known, so nothing may be concluded."""
