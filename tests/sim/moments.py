"""Moments of recoveries, as the controller notes and tells them: faults that watch for one come just then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemini_hpc.controller.journal import NODES, Journal
from gemini_hpc.controller.recoveries import Recoveries

# Notes of the journal (step and phase), and events.
BEFORE_DOWN = ("confirmed", "open before", "reserve before", "reserve after", "down before")
ON_THE_WAY = (
    "detected",
    *BEFORE_DOWN,
    "down after",
    "pin before",
    "pin after",
    "completing",
    "requeued",
    "requeue before",
    "requeue after",
    "start before",
    "configuring",
    "running",
    "delete before",
    "delete after",
    "close after",
)


class Moments:
    """Who waits for which one."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Callable[[int], None]]] = []
        _around(Journal, "write_line", self._noted)
        _around(Recoveries, "log_event", self._told)

    def at(self, moment: str, what: Callable[[int], None]) -> None:
        """Once, as part of the controller, with the job's id."""
        self._waiting.append((moment, what))

    def over(self) -> None:
        """Nothing is waited for any more."""
        self._waiting.clear()

    def _come(self, moment: str, number: int) -> None:
        due = [w for w in self._waiting if w[0] == moment]
        self._waiting = [w for w in self._waiting if w[0] != moment]
        for _, what in due:
            what(number)

    def _noted(self, key: str, step: str, phase: str, **_: Any) -> None:
        if key != NODES:
            self._come(f"{step} {phase}", int(key.partition(".")[0]))

    def _told(self, raw_id: int, restart: int, event: str, *_: Any) -> None:
        self._come(event, raw_id)


def _around(owner: Any, name: str, then: Callable[..., None]) -> None:
    was = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **named: Any) -> None:
        was(self, *args, **named)
        then(*args, **named)

    setattr(owner, name, wrapped)
