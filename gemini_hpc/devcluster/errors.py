"""The one error that the development cluster raises, and what it quotes."""

from __future__ import annotations

from pathlib import Path


class DevclusterError(Exception):
    """What was wanted, what was found, what to do: one line that is shown to the user as it is."""


def log_tail(log: Path, lines: int = 4) -> str:
    """The end of a log for an error message, on one line."""
    try:
        return " | ".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "no log"
