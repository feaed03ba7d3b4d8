"""A device in a time of its own: work takes as long as it is said to take, and only who waits lets time pass.

Two streams: what the training computes, and its collectives, which wait for what was computed before them. The host
launches in no time, so it is ahead of the device by as much as it does not wait for.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

LAUNCH_S = 1e-6  # so that two marks are never at one moment
AHEAD_S = 0.5


class TimedMark:
    """Reached at a moment that is known from the beginning."""

    def __init__(self, device: TimedDevice, at: float) -> None:
        self._device, self.at = device, at

    def query(self) -> bool:
        return self._device.clock() >= self.at

    def count_seconds_since(self, earlier: Any) -> float:
        assert self.query() and earlier.query(), "a time is asked of a mark that has not been reached"
        return float(self.at - earlier.at)


class TimedDevice:
    """A `Device`, and the clock."""

    backend = "nccl"

    def __init__(self) -> None:
        self.now = 0.0
        self._computed = self._communicated = 0.0
        self.grouped = False
        self.collectives: list[tuple[float, float]] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    # ---- time ------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.now

    def at(self, when: float, then: Callable[[], None]) -> None:
        """Something happens while others wait."""
        heapq.heappush(self._agenda, (when, next(self._numbers), then))

    def wait(self, seconds: float | None = None) -> bool:
        until = self.now + max(LAUNCH_S, seconds or 0.0)
        while self._agenda and self._agenda[0][0] <= until:
            when, _, then = heapq.heappop(self._agenda)
            self.now = max(self.now, when)
            then()
        self.now = max(self.now, until)
        return False

    def until(self, there: Callable[[], bool], most_s: float = 60.0) -> None:
        deadline = self.now + most_s
        while not there():
            assert self.now < deadline, "nothing happens any more"
            self.wait(1e-4)

    # ---- work ------------------------------------------------------------------------------------------

    def compute(self, seconds: float) -> None:
        self._computed = max(self._computed, self.clock()) + seconds + LAUNCH_S

    def collective(self, seconds: float) -> None:
        start = max(self._computed, self._communicated, self.clock())
        self._communicated = start + seconds
        self.collectives.append((start, self._communicated))

    def join(self) -> None:
        """What is computed from now on waits for the collectives."""
        self._computed = max(self._computed, self._communicated)

    # ---- marks -----------------------------------------------------------------------------------------

    def is_capturing(self) -> bool:
        return False

    def is_grouping(self) -> bool:
        return self.grouped

    def record_mark(self) -> TimedMark:
        self.compute(0.0)
        return TimedMark(self, self._computed)

    def record_end(self, work: Any) -> TimedMark:
        assert work is None
        return TimedMark(self, self._communicated)


class LaggingDevice(TimedDevice):
    """One beside a real training: what it is given lasts as long in real time. Its queue is full when the host is
    AHEAD_S ahead; until then the host does not wait. Its collectives are gloo's, done when they are launched; on the
    device each begins later, and takes `collective_s`."""

    backend = "gloo"

    def __init__(self, collective_s: float) -> None:
        super().__init__()
        self._collective_s = collective_s
        self._lock = threading.Lock()

    def clock(self) -> float:
        return time.monotonic()

    def compute(self, seconds: float) -> None:
        with self._lock:
            super().compute(seconds)
            ahead_s = self._computed - self.clock()
        time.sleep(max(0.0, ahead_s - AHEAD_S))

    def record_end(self, work: Any) -> TimedMark:
        with self._lock:
            self.collective(self._collective_s)
            self.join()
            return TimedMark(self, self._communicated)
