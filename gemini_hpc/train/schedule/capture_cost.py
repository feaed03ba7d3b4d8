"""Measure the capture inside step(), which a version costs the training's own thread: it counts for the ceiling."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from statistics import median

from gemini_hpc import clock
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.state import encode, sharded
from gemini_hpc.train.state.lifted import Lift
from gemini_hpc.train.state.tree import Stateful

LEAST_S = 0.002  # a shorter one is a part of the iteration: a busy node's processors take as long now and then
_SURE = 3  # of so many captures the shortest is what one surely costs


class CaptureCost:
    """The captures of one rank, by iteration. An iteration begins with the capture of its step(), if there is one.
    behind: iterations that a device may be behind its host, and still be told of."""

    def __init__(self, behind: int) -> None:
        self._latest: deque[float] = deque(maxlen=_SURE)
        self._ended: deque[float] = deque([0.0] * behind, maxlen=behind)
        self._begun_s = 0.0
        self._held: deque[float] = deque(maxlen=_SURE)

    def captured(self, began: float, mark: Event | None) -> None:
        """Record a capture since `began` (CLOCK_MONOTONIC). mark: where the training's device was then. A device that
        has not come there by now had enough to do, and has lost nothing."""
        waited = mark is None or mark.query()
        self._begun_s = clock.monotonic() - began if waited else 0.0
        self._latest.append(self._begun_s)

    def held(self, seconds: float) -> None:
        """Record that the optimizer has waited so long for a version's copy."""
        self._held.append(seconds)

    @property
    def held_s(self) -> float:
        """Return the seconds that the optimizer surely waits for a copy now, 0 where they do not count."""
        least_s = min(self._held) if len(self._held) == _SURE else 0.0
        return least_s if least_s >= LEAST_S else 0.0

    @property
    def whole_s(self) -> float:
        """Return the seconds that a version surely costs the training's thread, however rarely it is saved."""
        return self.seconds + self.held_s

    @property
    def begun_s(self) -> float:
        """Return the seconds of the capture in this iteration, as far as they count."""
        return self._begun_s if self.seconds else 0.0

    def iteration(self) -> None:
        """End an iteration, and begin another."""
        self._ended.append(self._begun_s)
        self._begun_s = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds that a capture surely costs now, 0 where they do not count."""
        least_s = min(self._latest) if len(self._latest) == _SURE else 0.0
        return least_s if least_s >= LEAST_S else 0.0

    @property
    def usual_s(self) -> float:
        """Return the seconds that a capture takes lately, noise included, 0 where they do not count."""
        return median(self._latest) if self.seconds else 0.0

    def within(self, ago: int) -> float:
        """Return the seconds of the capture in the iteration that ended `ago` iterations before the last one, as far
        as they count."""
        return self._ended[-1 - ago] if self.seconds and ago < len(self._ended) else 0.0


def dearest(stateful: Mapping[str, Stateful], seconds: float) -> str:
    """Return the name of the object that takes more than half of a capture of so many seconds, "" where none does.
    That takes as long as a capture of these objects."""
    took_s: dict[str, float] = {}
    for name, item in stateful.items():
        began = clock.monotonic()
        with suppress(Exception):  # of the user's own state_dict()
            small = Lift(lambda key, tensor: True).out_of({"stateful": {name: sharded.parts(item.state_dict())}})
            encode.encode(small)
        took_s[name] = clock.monotonic() - began
    found = max(took_s, key=took_s.__getitem__, default="")
    return found if found and took_s[found] > seconds / 2 else ""
