"""What the device has reached of what the host has launched.

A host that launches work for a device runs ahead of it, often by a whole iteration. What is on the network now, which
idle span has begun and whether the training waits are questions to the device. So a mark is enqueued where an
iteration begins, before and behind each collective, and at either end of the optimizer's hook; who wants to know asks
the marks, in the order in which the device comes to them. Nothing here waits for the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gemini_hpc.train.device.interface import Event

_OTHERS = 8  # collectives after the next one that may be reached before it, on other streams
_DRIFT_S = 5e-5  # of the device's clock against the host's, in an iteration: more than there is
_STILL_S = 30.0


class Device(Protocol):
    """Marks in the queue of work of a training's device. Calls come from the threads that launch. backend: torch's
    name for it in process groups whose operations run on the device."""

    backend: str

    def capturing(self) -> bool:
        """Whether this thread records a graph: no mark may be made or asked now."""

    def grouping(self) -> bool:
        """Whether the training has a bracket open that gathers operations: they run together when it ends, and none
        of their works can be asked."""

    def here(self) -> Event:
        """A mark behind all that this thread has launched on its current stream."""

    def end(self, work: Any) -> Event:
        """A mark at the end of a collective that this thread has just launched: a `dist.Work`, or None where it runs
        on the current stream. Raises RuntimeError for one that cannot be followed."""


class After:
    """A mark so long behind another: where nothing tells when an operation ends."""

    def __init__(self, mark: Event, seconds: float, clock: Callable[[], float]) -> None:
        self._mark, self._seconds, self._clock = mark, seconds, clock
        self._seen_s: float | None = None

    def query(self) -> bool:
        if self._seen_s is None and self._mark.query():
            self._seen_s = self._clock()
        return self._seen_s is not None and self._clock() >= self._seen_s + self._seconds

    def seconds_since(self, earlier: Any) -> float:
        return self._mark.seconds_since(earlier) + self._seconds


class Place(NamedTuple):
    """Where the device is. lap: its iteration, counted from 0; behind: so many iterations before the host's newest;
    launched: collectives of this one that it has begun; flying: those of any that have not ended; at_gate: it has
    come to where the host is in its newest iteration, if that is the optimizer's hook (or has not moved for so long
    that nobody should wait for it); passed_at: when it went on from the hook of its own (CLOCK_MONOTONIC), None
    before."""

    lap: int
    behind: int
    launched: int
    flying: int
    at_gate: bool
    passed_at: float | None


class _Lap:
    """One iteration as it was launched."""

    __slots__ = ("arrived", "at_gate", "begun_s", "count", "early", "mark", "ops", "passed", "passed_at")

    def __init__(self, mark: Event) -> None:
        self.mark = mark
        self.begun_s = 0.0
        self.ops: list[tuple[Event, Event]] = []
        self.count = 0  # of them begun, without one missing
        self.early: set[int] = set()  # numbers of those begun before an earlier one
        self.arrived: Event | None = None
        self.passed: Event | None = None
        self.at_gate = False
        self.passed_at: float | None = None


class Front:
    """Of one training, from the iteration that begins at `mark` on. Told by the threads that launch, in the order of
    their launches; asked from any thread."""

    def __init__(self, mark: Event, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._laps = deque([_Lap(mark)])
        self._number = 0  # of the first of them
        self._begun = False
        self._base, self._base_s = mark, 0.0  # a mark, and when the device came to it on the host's clock
        self._running: list[Event] = []
        self._ended_s = 0.0
        self._moved_s = clock()
        self.waited_s: float | None = None  # at the optimizer, in the newest iteration that the device has ended

    # ---- from the threads that launch ------------------------------------------------------------------

    def step(self, mark: Event) -> None:
        """The next iteration begins."""
        with self._lock:
            self._advance()  # where nobody asks, what the device has done need not be remembered
            self._laps.append(_Lap(mark))

    def launched(self, begun: Event, ended: Event) -> None:
        """One more collective. ended: the same as begun for one that needs no network."""
        with self._lock:
            self._laps[-1].ops.append((begun, ended))

    def arrived(self, mark: Event) -> None:
        """The host has come to the optimizer; the first time in an iteration counts."""
        with self._lock:
            if self._laps[-1].arrived is None:
                self._laps[-1].arrived = mark

    def passed(self, mark: Event) -> None:
        """The host goes on to the optimizer's step."""
        with self._lock:
            self._laps[-1].passed = mark

    # ---- from anywhere ---------------------------------------------------------------------------------

    def look(self) -> Place:
        """Where the device is now."""
        with self._lock:
            self._advance()
            lap, newest = self._laps[0], self._laps[-1]
            behind = len(self._laps) - 1
            at_gate = newest.arrived is None or newest.at_gate or self._still()
            return Place(self._number, behind, lap.count, len(self._running), at_gate, lap.passed_at)

    def caught_up(self) -> bool:
        """Whether the device has come to the host's newest iteration, or has not moved for so long that nobody should
        wait for it."""
        return not self.look().behind or self._still()

    def _still(self) -> bool:
        return self._clock() - self._moved_s > _STILL_S

    @property
    def quiet_since(self) -> float:
        """When the last collective ended, or the iteration began, as of the last look."""
        return max(self._ended_s, self._laps[0].begun_s)

    @property
    def begun_s(self) -> float:
        """When the device's iteration began, as of the last look."""
        return self._laps[0].begun_s

    def host_s(self, mark: Event) -> float:
        """When the device came to a mark that it has reached, on the host's clock."""
        with self._lock:
            self._advance()
            return self._at(mark, self._clock())

    def _at(self, mark: Event, now: float) -> float:
        """Marks are seen late, by as much as nobody has looked; but never before they are reached. So where a mark
        would lie in the future, the one that all are counted from was seen too late."""
        at = self._base_s + mark.seconds_since(self._base)
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
            self._collectives(lap, now)
            self._gate(lap, now)
            if len(self._laps) < 2 or not self._laps[1].mark.query():
                return
            self._next(now)

    def _collectives(self, lap: _Lap, now: float) -> None:
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
                self._ended_s, self._moved_s = max(self._ended_s, self._at(mark, now)), now
            else:
                left.append(mark)
        self._running = left

    def _gate(self, lap: _Lap, now: float) -> None:
        if not lap.at_gate and lap.arrived is not None and lap.arrived.query():
            lap.at_gate, self._moved_s = True, now
        if lap.passed_at is None and lap.at_gate and lap.passed is not None and lap.passed.query():
            lap.passed_at, self._moved_s = self._at(lap.passed, now), now

    def _next(self, now: float) -> None:
        """The device has begun the next iteration."""
        over = self._laps.popleft()
        self._number += 1
        self._running += [
            ended for n, (_, ended) in enumerate(over.ops[over.count :], over.count) if n not in over.early
        ]
        self.waited_s = 0.0
        if over.arrived is not None and over.passed is not None and over.passed.query():
            self.waited_s = max(0.0, over.passed.seconds_since(over.arrived))
        lap = self._laps[0]
        lap.begun_s = min(now, self._at(lap.mark, now) + _DRIFT_S)
        self._base, self._base_s, self._moved_s = lap.mark, lap.begun_s, now
