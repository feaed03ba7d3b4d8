"""The log format of agents and controller: one event is one line of `key=value`, with the time in front."""

from __future__ import annotations

import logging
from typing import TextIO


class OneLine(logging.Formatter):
    """A formatter that makes each event one line of printable text, regardless of text from agents and users."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line; tracebacks of this package follow below it."""
        text = super().formatMessage(record)
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore errors: a full disk only loses log lines."""


def write_to(stream: TextIO, *, verbose: bool = False) -> None:
    """Send all log lines of this process to a stream."""
    handler = _Handler(stream)
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
