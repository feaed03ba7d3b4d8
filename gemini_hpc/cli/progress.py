"""How far a computation is, on stderr."""

from __future__ import annotations

import sys

from gemini_hpc import clock

_EVERY_S = 0.1


class Progress:
    """One line that is overwritten where stderr is a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._next = 0.0

    def show(self, text: str) -> None:
        """What goes on now; too soon after the last time it is left out."""
        if self._live and clock.monotonic() >= self._next:
            self._next = clock.monotonic() + _EVERY_S
            print(f"\r\033[K{text[:79]}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Remove the line."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
