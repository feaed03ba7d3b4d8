"""How agents and the controller log: one event is one line of `key=value`, with the time in front."""

from __future__ import annotations

import logging
from typing import TextIO


class OneLine(logging.Formatter):
    """One event is one line of printable text, whatever agents and users have put into it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line; tracebacks of our own come below it."""
        text = super().formatMessage(record)
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk costs lines, and nothing else."""


def to(stream: TextIO, *, verbose: bool = False) -> None:
    """All log lines of this process go there."""
    handler = _Handler(stream)
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
