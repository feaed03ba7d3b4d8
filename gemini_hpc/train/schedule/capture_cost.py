"""Measure the capture inside step(), which a version costs the training's own thread: it counts for the ceiling."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from statistics import median

from gemini_hpc import clock
from gemini_hpc.core.save_interval import choose
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.state import encode, sharded
from gemini_hpc.train.state.lifted import Lift
from gemini_hpc.train.state.tree import Stateful

LEAST_S = 0.002  # a shorter one is a part of the iteration: a busy node's processors take as long now and then
PACE_EVERY = 16
_POINT_S = 1e-6
_RARER = 1.25
_SURE = 3  # of so many captures the shortest is what one surely costs


class CaptureCost:
    """The captures of one rank, by iteration. An iteration begins with the capture of its step(), if there is one.
    behind: iterations that a device may be behind its host, and still be told of."""

    def __init__(self, behind: int) -> None:
        self._latest: deque[float] = deque(maxlen=_SURE)
        self._ended: deque[float] = deque([0.0] * behind, maxlen=behind)
        self._begun_s = 0.0

    def captured(self, began: float, mark: Event | None) -> None:
        """Record a capture since `began` (CLOCK_MONOTONIC). mark: where the training's device was then. A device that
        has not come there by now had enough to do, and has lost nothing."""
        waited = mark is None or mark.query()
        self._begun_s = clock.monotonic() - began if waited else 0.0
        self._latest.append(self._begun_s)

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


class Pace:
    """The interval between saves of a training without planned traffic, by what its ceiling leaves for captures."""

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._free: deque[float] = deque(maxlen=PACE_EVERY)  # lengths of iterations without what is ours

    @property
    def usual_s(self) -> float:
        """Return the seconds of an iteration without a capture."""
        return max(_POINT_S, median(self._free))

    def wanted(self, version: int, free_s: float, own_s: float) -> int:
        """Return one version in how many should be saved, every `PACE_EVERY` versions; else 0.

        Args:
            version: the one that ends the iteration.
            free_s: seconds of the iteration without what is ours.
            own_s: seconds of a capture.
        """
        self._free.append(free_s)
        if version % PACE_EVERY or len(self._free) < PACE_EVERY:
            return 0
        return choose(lambda s: 0.0, self.usual_s, ceiling=self._ceiling, spread=False, own_s=own_s).j

    @staticmethod
    def alike(wanted: int, present: int) -> bool:
        """Return whether the difference may be noise: each change costs a version."""
        return present / 2 <= wanted <= _RARER * present


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
