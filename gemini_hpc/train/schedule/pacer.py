"""When each chunk of a version may go: in the idle spans of the training's own traffic (GEMINI paper, section 5).

The sending thread asks before each chunk. A chunk goes in the window that the timetable gives its first byte, or,
where that was missed, in a later one that has room; what is left when the version is due goes at once (Algorithm 2's
infinite last span): then the training waits for it. Where the sizes of chunks need not be said beforehand, a chunk is
cut to what is left of the window: one that comes late does not hold up all behind it until a window is large enough.

Where the training computes on a device, its host runs ahead. What counts is then where the device is
(`Traffic.place`): also a training that waits at the optimizer waits only from when its device has come there.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import Literal, NamedTuple, Protocol

from gemini_hpc import clock
from gemini_hpc.core.chunks import cut
from gemini_hpc.train.device.progress import Place
from gemini_hpc.train.schedule.chunk_schedule import Timetable
from gemini_hpc.train.schedule.link_model import LinkMeter

Scheme = Literal["none", "blocking", "naive", "background", "no_pipeline", "gemini"]
SCHEMES: tuple[Scheme, ...] = ("none", "blocking", "naive", "background", "no_pipeline", "gemini")
PROBE_BYTES = 4096  # the first chunk of a version without a timetable: it shows the link's startup time
# A chunk is not cut smaller than the larger of these (a share of what a chunk may have): each takes some 0.3 ms of
# processors at both ends.
LEAST_BYTES, _LEAST_SHARE = 64 << 10, 16
_LOOK_S, _SOON_S, _SPAN_S = 0.02, 0.001, 0.1
# A training of whose traffic nothing is seen for longer than two of its usual iterations, and this, pauses
# (evaluates, for instance). Of the first iteration the length is not known; one with a pause in it is not usual.
_PAUSE_S, _FIRST_PAUSE_S, _LENGTHS = 1.0, 5.0, 8
_JOURNAL, _COPIES = 4096, 64


class Traffic(Protocol):
    """What the pacer sees of the training's collectives in the current iteration."""

    @property
    def launched(self) -> int:
        """How many so far."""

    def in_flight(self) -> int:
        """Collectives launched and not completed."""

    def place(self) -> Place | None:
        """Where the training's device is, of which the other answers are then; None: it computes on the host."""

    def quiet_since(self) -> float:
        """When the last one completed, or the iteration began (CLOCK_MONOTONIC)."""

    def wait_span(self, after: int, timeout_s: float) -> bool:
        """Wait until `after` collectives of this iteration were launched and none is in flight. False: not yet, or
        `wake` was called."""

    def wake(self) -> None:
        """Who waits for a span shall look again."""


class Sent(NamedTuple):
    """A chunk that has arrived. Times of CLOCK_MONOTONIC; hurried: the training was waiting for it."""

    version: int
    replica: int
    size: int
    sent_at: float
    acked_at: float
    hurried: bool


class _Wait(NamedTuple):
    """seconds: until a chunk may go, or it is worth looking again; 0: now, and so many bytes. after: until so many
    collectives were launched and none is in flight; -1: not that. crowded: what is on its way is in the way; look
    again when some of it has arrived."""

    seconds: float
    after: int = -1
    size: int = 0
    crowded: bool = False


class Pacer:
    """For one sending thread; the training's thread tells it of iterations and of the moment when it waits."""

    def __init__(self, chunk_bytes: int, p: int, *, clock: Callable[[], float] = clock.monotonic) -> None:
        self.chunk_bytes, self.p, self._clock = chunk_bytes, p, clock
        self.traffic: Traffic | None = None
        self.timetable: Timetable | None = None
        self.deferred = False  # without a timetable: everything waits for `hurry` (profiling)
        self.unscheduled = False  # everything goes at once, beside the training's traffic
        self.meter = LinkMeter()
        self.journal: deque[Sent] = deque(maxlen=_JOURNAL)
        self.copies: deque[tuple[float, float, int]] = deque(maxlen=_COPIES)  # (from, to, bytes) into the own slot
        self._progress_at = self._arrived_at = 0.0
        self._looked_at = -1.0
        self.spilled_bytes = 0  # of the version on its way: went because it was due
        self._version = 0
        self._now = 0
        self._begun_at = 0.0
        self._lengths: deque[float] = deque(maxlen=_LENGTHS)
        self._stepped_at: float | None = None
        self.strayed = False  # chunks went into a pause of this iteration, though they were to wait for `hurry`
        self._passed = (-1, 0.0)  # the iteration whose gate was passed last, and when
        self._hurry = threading.Event()
        self._asked = False  # the host of the training waits for the version; its device may have long to go
        self._ending = False
        self._crowded = False  # the sending thread wants to know of the next acknowledgement
        self._table: Timetable | None = None

    # ---- from the training's thread --------------------------------------------------------------------

    def iteration(self, version: int) -> None:
        """The iteration after step() number `version` begins."""
        now = self._clock()
        if self._stepped_at is not None:
            self._lengths.append(now - self._stepped_at)
        self._stepped_at, self._now, self.strayed = now, version, False
        self.wake()

    def gate(self) -> None:
        """The training has come to the optimizer, and goes on."""
        self._passed = (self._now, self._clock())

    def hurry(self) -> None:
        """The version on its way goes at once."""
        self._hurry.set()
        self.wake()

    def wait_for(self) -> None:
        """The training waits for the version on its way, or will when its device has come to where it waits."""
        self._asked, self._looked_at = True, -1.0
        if self._there():
            self.hurry()
        else:
            self.wake()

    def end(self) -> None:
        """The training is over: everything goes at once from now on."""
        self._ending = True
        self.hurry()

    @property
    def arrived_at(self) -> float:
        """When the training's device has come to where the host waits; now, as long as it has not. 0: it computes on
        the host."""
        now = self._clock()
        if now - self._looked_at >= _SOON_S:  # who waits for a seal asks more often than that
            self._looked_at = now
            if not self._there():
                self._arrived_at = now
        return self._arrived_at

    @property
    def progress_at(self) -> float:
        """When something of the version last arrived, or the device came to where the host waits for it."""
        return max(self._progress_at, self.arrived_at)

    def _there(self) -> bool:
        place = self.traffic.place() if self.traffic is not None and self._asked else None
        return place is None or place.at_gate

    def wake(self) -> None:
        """Who waits for a span shall look again."""
        if self.traffic is not None:
            self.traffic.wake()

    # ---- from the sending thread -----------------------------------------------------------------------

    def lull(self, version: int, seconds: float, wanted: Callable[[], bool]) -> None:
        """Block until the training's processors are probably idle for `seconds`: in the first span that is so long.
        Not where there is none, or all idle time is needed to send; not when `wanted()` is true and `wake` called
        (within the milliseconds that are left out of a span, if it has begun).
        What the training does between collectives right after step() is mostly Python, which runs in one thread at a
        time."""
        table, traffic = self.timetable, self.traffic
        window = table.lull(seconds) if table is not None and not self._ending else None
        if table is None or window is None or traffic is None:
            return
        until = self._clock() + table.usual_s / 2
        while self._now == version and not wanted() and self._clock() < until:
            if traffic.launched > window.after:
                return
            if traffic.wait_span(window.after, _SPAN_S):
                begins = traffic.quiet_since() + window.delay_s
                self._hurry.wait(min(_LOOK_S, max(0.0, begins - self._clock())))
                return

    def begin(self, version: int) -> None:
        """The chunks of this version come next."""
        self._version, self._table, self.spilled_bytes = version, self.timetable, 0
        self.moved()
        self._begun_at = self._clock()
        self._asked = False
        self._hurry.clear()
        if self._ending:
            self._hurry.set()

    def moved(self) -> None:
        """Something of the version has arrived somewhere: who waits for it need not give up."""
        self._progress_at = self._clock()

    def sizes(self, replica: int, used_bytes: int) -> tuple[int, ...]:
        """Sizes of the chunks of `used_bytes` bytes, in order, where they must be said beforehand."""
        if self._table is None or replica >= len(self._table.chunks):
            head = min(PROBE_BYTES, used_bytes)
            return tuple(n for n in (head, *(length for _, length in cut(used_bytes - head, self.chunk_bytes))) if n)
        sizes: list[int] = []
        left = used_bytes
        for _, size in self._table.chunks[replica]:
            if left:
                sizes.append(min(size, left))
                left -= sizes[-1]
        sizes += [length for _, length in cut(left, self.chunk_bytes)]
        return tuple(sizes)

    def turn(self, replica: int, at: int, size: int, backlog_bytes: Callable[[], int]) -> None:
        """Block until the chunk of `size` bytes from byte `at` of a replica may go. backlog_bytes: sent before it and
        not yet acknowledged, now."""
        self._grant(replica, at, size, size, backlog_bytes)

    def free_turn(self, replica: int, at: int, left: int, backlog_bytes: Callable[[], int]) -> int:
        """Block until a chunk from byte `at` may go, where `left` bytes are left: of how many bytes."""
        if self._table is None and not at:
            left = min(left, PROBE_BYTES)
        most = min(left, self.chunk_bytes)
        least = max(LEAST_BYTES, self.chunk_bytes // _LEAST_SHARE)
        return self._grant(replica, at, min(most, least), most, backlog_bytes)

    def _grant(self, replica: int, at: int, least: int, most: int, backlog_bytes: Callable[[], int]) -> int:
        while not self._due():
            backlog = backlog_bytes()
            wait = self._look(replica, at, least, most, backlog)
            if wait.seconds <= 0:
                return wait.size
            self._crowded = wait.crowded
            if wait.crowded and backlog_bytes() < backlog:  # meanwhile
                continue
            if wait.after < 0 or self.traffic is None:
                self._hurry.wait(min(wait.seconds, _SOON_S if self._asked else _LOOK_S))
            else:
                self.traffic.wait_span(wait.after, _SOON_S if self._asked else _SPAN_S)
        self.spilled_bytes += most
        return most

    def _due(self) -> bool:
        if self._asked and not self._hurry.is_set() and self._there():
            self._hurry.set()
        return self._hurry.is_set()

    def sent(self, at: float) -> None:
        """A chunk goes."""
        traffic = self.traffic
        self.meter.sent(at, beside=self.unscheduled or (traffic is not None and traffic.in_flight() > 0))

    def landed(self, replica: int, size: int, sent_at: float) -> None:
        """A chunk was acknowledged just now, and is no longer in the backlog."""
        now = self._clock()
        self.meter.landed(size, now)
        self.journal.append(Sent(self._version, replica, size, sent_at, now, self._hurry.is_set()))
        self._progress_at = now
        if self._crowded:
            self._crowded = False
            self.wake()

    def _pauses(self) -> bool:
        traffic = self.traffic
        if traffic is None or self._stepped_at is None:
            return False
        patience_s = 2 * median_low(self._lengths) if self._lengths else _FIRST_PAUSE_S
        return not traffic.in_flight() and self._clock() - traffic.quiet_since() > max(_PAUSE_S, patience_s)

    def _place(self, traffic: Traffic) -> tuple[tuple[int, int, bool], float]:
        """Iteration since the version's step(), collectives launched in it, whether it has passed the gate; and
        when."""
        place = traffic.place()
        if place is None:
            passed, passed_at = self._passed
            return (self._now - self._version, traffic.launched, passed == self._now), passed_at
        gated = place.passed_at is not None
        return (self._now - place.behind - self._version, place.launched, gated), place.passed_at or 0.0

    def _look(self, replica: int, at: int, least: int, most: int, backlog_bytes: int) -> _Wait:
        table, traffic = self._table, self.traffic
        if table is None:
            # the probe disturbs nobody, and shows alpha only where no other rank's copies are on the way
            probe = not at and most <= PROBE_BYTES and traffic is not None and not traffic.in_flight()
            if not self.deferred or probe:
                return _Wait(0.0, size=most)
            pauses = self._pauses()
            self.strayed |= pauses
            return _Wait(0.0 if pauses else _LOOK_S, size=most)
        if traffic is None:
            return _Wait(_LOOK_S)
        place, passed_at = self._place(traffic)
        gated = place[2]
        flying = traffic.in_flight()  # asked last: one that is launched meanwhile is seen
        if self._clock() - self._begun_at > table.usual_s and not flying:
            return _Wait(0.0, size=most)  # the training pauses, or does something else: that may last
        here = max(table.planned(replica, at), bisect_left(table.places, place))
        crowded = False
        if here < len(table.windows) and not flying and table.places[here][:2] == place[:2]:
            if table.places[here][2] != gated:
                return _Wait(_SOON_S)
            elapsed = self._clock() - max(traffic.quiet_since(), passed_at if gated else 0.0)
            while here < len(table.windows) and table.places[here] == place:
                window = table.windows[here]
                left = table.room(window.delay_s + window.length_s - elapsed, 0)
                if left - backlog_bytes >= least:
                    return _Wait(max(0.0, window.delay_s - elapsed), size=min(left - backlog_bytes, most))
                crowded = crowded or left >= least
                here += 1
        if here >= len(table.windows) or table.places[here][0] != place[0]:
            return _Wait(_LOOK_S)
        if table.places[here][1] == place[1] and not flying:
            return _Wait(_SOON_S)
        return _Wait(_LOOK_S, table.places[here][1], crowded=crowded)
