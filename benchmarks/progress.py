"""One line on stderr that says what is being measured."""

from __future__ import annotations

import sys
import time


class Progress:
    """Overwrites its line on a terminal; elsewhere a new line every few seconds."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._began = time.monotonic()
        self._last = 0.0
        self._topic = ""

    def say(self, topic: str, detail: str = "") -> None:
        """What goes on now."""
        now = time.monotonic()
        text = f"[{now - self._began:5.0f} s] {topic}{': ' if detail else ''}{detail}"
        if self._live:
            print(f"\r\033[K{text[:150]}", end="", file=sys.stderr, flush=True)
        elif topic != self._topic or now - self._last > 10:
            print(text, file=sys.stderr, flush=True)
        else:
            return
        self._topic, self._last = topic, now

    def done(self) -> None:
        """Leave the line."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
