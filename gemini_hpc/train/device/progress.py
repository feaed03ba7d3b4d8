"""The progress of a device in the work that the host has launched.

A host that launches work for a device runs ahead of it, often by a whole iteration. Only the device knows which
collective is on the network now, which idle span has begun and whether the training waits. So a mark is enqueued
where an iteration begins, before and behind each collective, and at either end of the optimizer's hook. Readers query
the marks in the order in which the device reaches them. No call here waits for the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gemini_hpc.train.device.interface import Event

_OTHERS = 8  # collectives after the next one that may be reached before it, on other streams
_DRIFT_S = 5e-5  # bound on the drift between device and host clock within an iteration
_STILL_S = 30.0  # a device that has not moved for so long is not waited for


class Device(Protocol):
    """Marks in the queue of work of a training's device.

    Calls come from the threads that launch work.

    Attributes:
        backend: torch's name for the device in process groups whose operations run on it.
    """

    backend: str

    def is_capturing(self) -> bool:
        """Return whether this thread records a graph. No mark may be made or queried then."""

    def is_grouping(self) -> bool:
        """Return whether the training has an open bracket that gathers operations.

        The operations run together when the bracket ends. Until then none of their works can be queried.
        """

    def record_mark(self) -> Event:
        """Record a mark behind all that this thread has launched on its current stream."""

    def record_end(self, work: Any) -> Event:
        """Record a mark at the end of a collective that this thread has just launched.

        Args:
            work: A `dist.Work`, or None where the collective runs on the current stream.

        Raises:
            RuntimeError: The collective cannot be followed.
        """


class After:
    """A mark a fixed time behind another, for operations whose end nothing reports."""

    def __init__(self, mark: Event, seconds: float, clock: Callable[[], float]) -> None:
        self._mark, self._seconds, self._clock = mark, seconds, clock
        self._seen_s: float | None = None

    def query(self) -> bool:
        """Return whether the other mark was reached at least `seconds` ago."""
        if self._seen_s is None and self._mark.query():
            self._seen_s = self._clock()
        return self._seen_s is not None and self._clock() >= self._seen_s + self._seconds

    def count_seconds_since(self, earlier: Any) -> float:
        """Return the seconds from an earlier mark to this one."""
        return self._mark.count_seconds_since(earlier) + self._seconds


class Place(NamedTuple):
    """The position of the device in the work that the host has launched.

    Attributes:
        lap: The device's iteration, counted from 0.
        behind: Number of iterations from the device's to the host's newest.
        launched: Number of collectives of the device's iteration that it has begun.
        flying: Number of collectives of any iteration that have begun and not ended.
        at_gate: The device has reached the host's position, where the host's is at the optimizer's hook of its newest
            iteration. Also true while the host has not come to that hook, and where the device has not moved for so
            long that waiting for it is useless.
        passed_at: Time at which the device went on from the optimizer's hook of its iteration (CLOCK_MONOTONIC); None
            before.
    """

    lap: int
    behind: int
    launched: int
    flying: int
    at_gate: bool
    passed_at: float | None


class _Lap:
    """An iteration as the host launched it."""

    __slots__ = ("arrived", "at_gate", "begun_s", "count", "early", "failing_s", "mark", "ops", "passed", "passed_at")

    def __init__(self, mark: Event) -> None:
        self.mark = mark
        self.begun_s = 0.0
        self.ops: list[tuple[Event, Event]] = []
        self.count = 0  # of ops that have begun, without a gap
        self.early: set[int] = set()  # numbers of ops that began before an earlier one
        self.arrived: Event | None = None
        self.passed: Event | None = None
        self.failing_s = 0.0  # between the two, on the host
        self.at_gate = False
        self.passed_at: float | None = None


class Front:
    """The device's position in a training, from the iteration that begins at `mark` on.

    The threads that launch report to it in the order of their launches. Any thread may read it.
    """

    def __init__(self, mark: Event, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._laps = deque([_Lap(mark)])
        self._number = 0  # of the first lap, the device's
        self._begun = False
        self._base, self._base_s = mark, 0.0  # base mark and when the device came to it, host clock
        self._running: list[Event] = []
        self._ended_s = 0.0
        self._moved_s = clock()
        self.waited_s: float | None = None  # at the optimizer, in the last iteration the device ended; none failing

    # ---- called by the threads that launch ------------------------------------------------------------------

    def begin_iteration(self, mark: Event) -> None:
        """Record that the next iteration begins."""
        with self._lock:
            self._advance()  # drops the laps that the device has ended, also where nobody polls
            self._laps.append(_Lap(mark))

    def record_collective(self, begun: Event, ended: Event) -> None:
        """Record a collective of the newest iteration.

        Args:
            begun: Mark before the collective.
            ended: Mark behind the collective; the same as `begun` for a collective that needs no network.
        """
        with self._lock:
            self._laps[-1].ops.append((begun, ended))

    def record_arrival(self, mark: Event) -> None:
        """Record that the host has come to the optimizer. Only the first call in an iteration counts."""
        with self._lock:
            if self._laps[-1].arrived is None:
                self._laps[-1].arrived = mark

    def record_pass(self, mark: Event, failing_s: float = 0.0) -> None:
        """Record that the host goes on to the optimizer's step.

        Args:
            mark: Mark behind the wait.
            failing_s: Seconds of the wait in which a node or an agent was missing.
        """
        with self._lock:
            self._laps[-1].passed, self._laps[-1].failing_s = mark, failing_s

    # ---- called by any thread ---------------------------------------------------------------------------------

    def poll_position(self) -> Place:
        """Poll the marks and return the device's position."""
        with self._lock:
            self._advance()
            lap, newest = self._laps[0], self._laps[-1]
            behind = len(self._laps) - 1
            at_gate = newest.arrived is None or newest.at_gate or self._is_still()
            return Place(self._number, behind, lap.count, len(self._running), at_gate, lap.passed_at)

    def has_caught_up(self) -> bool:
        """Return whether the device has reached the host's newest iteration.

        Also return true where the device has not moved for so long that waiting for it is useless.
        """
        return not self.poll_position().behind or self._is_still()

    def _is_still(self) -> bool:
        return self._clock() - self._moved_s > _STILL_S

    @property
    def quiet_since(self) -> float:
        """Return when the last collective ended or the iteration began, as of the last poll."""
        return max(self._ended_s, self._laps[0].begun_s)

    @property
    def begun_s(self) -> float:
        """Return when the device's iteration began, as of the last poll."""
        return self._laps[0].begun_s

    def time_mark(self, mark: Event) -> float:
        """Return when the device came to a mark that it has reached, on the host's clock."""
        with self._lock:
            self._advance()
            return self._time_mark(mark, self._clock())

    def _time_mark(self, mark: Event, now: float) -> float:
        """Return when the device came to a mark, on the host's clock.

        Marks are seen late, by the time since the last poll, but never before they are reached. A result in the
        future therefore shows that the base mark was seen too late. The base is then moved back.
        """
        at = self._base_s + mark.count_seconds_since(self._base)
        if at > now:
            self._base_s -= at - now
            at = now
        return at

    def _advance(self) -> None:
        now = self._clock()
        if not self._begun:
            if not self._base.query():
                return
            self._begun, self._base_s, self._moved_s = True, now, now
            self._laps[0].begun_s = now
        while True:
            lap = self._laps[0]
            self._advance_collectives(lap, now)
            self._advance_gate(lap, now)
            if len(self._laps) < 2 or not self._laps[1].mark.query():
                return
            self._advance_iteration(now)

    def _advance_collectives(self, lap: _Lap, now: float) -> None:
        ops = lap.ops
        while lap.count < len(ops) and (lap.count in lap.early or ops[lap.count][0].query()):
            if lap.count not in lap.early:
                self._running.append(ops[lap.count][1])
                self._moved_s = now
            lap.early.discard(lap.count)
            lap.count += 1
        for number in range(lap.count + 1, min(lap.count + 1 + _OTHERS, len(ops))):
            if number not in lap.early and ops[number][0].query():
                lap.early.add(number)
                self._running.append(ops[number][1])
        left = []
        for mark in self._running:
            if mark.query():
                self._ended_s, self._moved_s = max(self._ended_s, self._time_mark(mark, now)), now
            else:
                left.append(mark)
        self._running = left

    def _advance_gate(self, lap: _Lap, now: float) -> None:
        if not lap.at_gate and lap.arrived is not None and lap.arrived.query():
            lap.at_gate, self._moved_s = True, now
        if lap.passed_at is None and lap.at_gate and lap.passed is not None and lap.passed.query():
            lap.passed_at, self._moved_s = self._time_mark(lap.passed, now), now

    def _advance_iteration(self, now: float) -> None:
        """Go on to the next iteration, which the device has begun."""
        over = self._laps.popleft()
        self._number += 1
        self._running += [
            ended for n, (_, ended) in enumerate(over.ops[over.count :], over.count) if n not in over.early
        ]
        self.waited_s = 0.0
        if over.arrived is not None and over.passed is not None and over.passed.query():
            self.waited_s = max(0.0, over.passed.count_seconds_since(over.arrived) - over.failing_s)
        lap = self._laps[0]
        lap.begun_s = min(now, self._time_mark(lap.mark, now) + _DRIFT_S)
        self._base, self._base_s, self._moved_s = lap.mark, lap.begun_s, now
