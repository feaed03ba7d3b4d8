"""Errors between this package and Slurm."""


class SlurmError(Exception):
    """The base of all errors between this package and Slurm."""


class SlurmRefused(SlurmError):
    """The error that Slurm refuses a request, or that its answer is of no use; the text is mostly Slurm's own."""


class UnknownJob(SlurmRefused):
    """The error that Slurm does not know this job, or no longer knows it."""


class SlurmUnreachable(SlurmError):
    """The error that slurmctld does not answer: its state is unknown, so no conclusion may be drawn."""


def build_error(text: str, command: str) -> SlurmError:
    """Return the error for the text of a refusal, by a command or another API of that name."""
    message = " ".join(text.split())[:300] or f"{command} failed without a message"
    low = message.lower()
    if "invalid job id" in low:
        return UnknownJob(message)
    contact = ("unable to contact", "connection refused", "socket timed out", "connection failure", "not responding")
    standby = ("standby mode", "in standby")
    if any(word in low for word in contact + standby):
        return SlurmUnreachable(message)
    return SlurmRefused(message)
