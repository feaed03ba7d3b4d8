"""Progress of a computation, on stderr."""

from __future__ import annotations

import sys

from gemini_hpc import clock

_EVERY_S = 0.1


class Progress:
    """A progress line that is overwritten on a terminal; elsewhere it prints nothing."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._next = 0.0

    def show(self, text: str) -> None:
        """Show the text, unless the previous one was shown too short a time ago."""
        if self._live and clock.monotonic() >= self._next:
            self._next = clock.monotonic() + _EVERY_S
            print(f"\r\033[K{text[:79]}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Remove the line."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
