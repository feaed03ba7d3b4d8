"""The copy of one version's tensors into the own slot, part by part, made by whoever needs the next part first.

The sending thread copies what it sends next, in the same idle spans: beside the training's collectives a copy would
take the processor from them. A training that needs its tensors copies what is left itself. (GEMINI paper, section
5.2: the local copy is cut into chunks, too.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Part(Protocol):
    """Some of the tensors. end: the bytes of the tensor area up to here are there after `copy`, which blocks."""

    @property
    def end(self) -> int:
        """See above."""

    def copy(self) -> None:
        """Make it."""


class Spent(NamedTuple):
    """Of the copying: from, to (CLOCK_MONOTONIC), bytes."""

    began: float
    ended: float
    size: int


class Copying:
    """parts: in order. check: the names of tensors whose copies cannot be trusted, once all are made; see `changed`.
    over: set when nothing is read from the tensors any more. Both methods may be called from any thread; neither
    raises, see `error`."""

    def __init__(self, parts: Sequence[Part], check: Callable[[], list[str]], over: threading.Event) -> None:
        self._parts, self._check, self._over = parts, check, over
        self._lock = threading.Lock()
        self._next = self._at = 0
        self.spent: list[Spent] = []
        self.changed: list[str] = []
        self.error: Exception | None = None

    @property
    def seconds(self) -> float:
        """Spent on copying so far."""
        return sum(spent.ended - spent.began for spent in self.spent)

    def up_to(self, end: int) -> None:
        """Return when the first `end` bytes of the tensor area are there, or never will be."""
        with self._lock:
            if self._over.is_set() or (self._at >= end and self._next < len(self._parts)):
                return
            began, before = time.monotonic(), self._at
            try:
                while self._at < end and self._next < len(self._parts):
                    part = self._parts[self._next]
                    part.copy()
                    self._at = part.end
                    self._next += 1
                self.spent.append(Spent(began, time.monotonic(), self._at - before))
                if self._next == len(self._parts):
                    self.changed = self._check()
                    self._over.set()
            except Exception as error:  # told by the thread that saves, never by the training's
                self.error = error
                self._over.set()

    def finish(self) -> None:
        """All of it."""
        self.up_to(self._parts[-1].end if self._parts else 0)
