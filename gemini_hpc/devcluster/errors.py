"""The only error that the development cluster raises, and the log excerpts in it."""

from __future__ import annotations

from pathlib import Path


class DevclusterError(Exception):
    """The error of the cluster tool, shown to the user as it is.

    Its text is one line with the wanted state, the found state and the remedy.
    """


def read_log_tail(log: Path, lines: int = 4) -> str:
    """Return the end of a log for an error message, on one line."""
    try:
        return " | ".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "no log"
