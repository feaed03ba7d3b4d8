"""Pacing of a version's bytes: they go in the idle spans of the training's own traffic (GEMINI section 5).

The sending thread writes a grant for each window that the timetable plans: how many bytes may go, and until when. The
agent sends them. If a window was missed, its bytes go in a later one that has room. Bytes that are left when the
version is due go at once (the infinite last span of Algorithm 2), while the training waits for them. A collective
that is launched within a window ends the grant.

A link that announces the sizes of its chunks asks before each chunk instead (`wait_for_turn`).

Where the training computes on a device, its host runs ahead, and the device's position counts
(`CollectiveMonitor.find_place`). A training that waits at the optimizer therefore counts as waiting only once its
device has arrived there.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import NamedTuple

from gemini_hpc import clock
from gemini_hpc.core.chunks import cut_chunks
from gemini_hpc.train.schedule.chunk_schedule import Timetable
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.link_model import LinkMeter
from gemini_hpc.train.transport.base import GrantOutbox
from gemini_hpc.wire.grant_page import Grant

PROBE_BYTES = 4096  # first grant of a version without a timetable: it measures the link's startup time
# A grant has at least LEAST_BYTES, or a chunk's bytes / _LEAST_SHARE if that is more: each costs some 0.3 ms of
# processors at both ends.
LEAST_BYTES, _LEAST_SHARE = 64 << 10, 16
# polls: of a quiet training; of one that asks for a seal, or is crowded; longest wait for a span
_LOOK_S, _SOON_S, _SPAN_S = 0.02, 0.001, 0.1
_ANY_RATE = 1e15  # bytes a second: where no link is known, only a grant's end limits it
# A training pauses (to evaluate, for instance) if it has no traffic for longer than two usual iterations and than
# _PAUSE_S. _FIRST_PAUSE_S stands in while no iteration's length is known. The median of the latest _LENGTHS counts,
# so that an iteration with a pause in it is not taken as usual.
_PAUSE_S, _FIRST_PAUSE_S, _LENGTHS = 1.0, 5.0, 8
_JOURNAL, _COPIES = 4096, 64


class Sent(NamedTuple):
    """Bytes that have arrived: a chunk, or those of a time in which bytes were always in flight.

    Attributes:
        version: Their version.
        replica: Number of the replica.
        size: Size in bytes.
        sent_at: Time at which the first one was sent (CLOCK_MONOTONIC, seconds).
        acked_at: Time of the last acknowledgement.
        hurried: Whether the training was waiting for them.
    """

    version: int
    replica: int
    size: int
    sent_at: float
    acked_at: float
    hurried: bool


class _Wait(NamedTuple):
    """The result of a check of whether a chunk may go.

    Attributes:
        seconds: Seconds until a chunk may go or the next check is worthwhile; 0: send now.
        after: Wait until this many collectives were launched and none is in flight; -1: no such condition.
        size: Bytes that may go, if `seconds` is 0.
        before: Time at which they must have arrived.
        rate: Bytes a second that the link carries.
        launched: No longer once more than this many collectives were launched; -1: no such condition.
        crowded: Whether chunks in flight take the room; check again when some have arrived.
    """

    seconds: float
    after: int = -1
    size: int = 0
    before: float = 0.0
    rate: float = _ANY_RATE
    launched: int = -1
    crowded: bool = False


class Pacer:
    """The pacer of one sending thread; the training's thread reports iterations and waits to it."""

    def __init__(self, chunk_bytes: int, p: int, *, clock: Callable[[], float] = clock.monotonic) -> None:
        self.chunk_bytes, self.p, self._clock = chunk_bytes, p, clock
        self.traffic: CollectiveMonitor | None = None
        self.timetable: Timetable | None = None
        self.deferred = False  # without a timetable: all chunks wait for `hurry` (profiling)
        self.unscheduled = False  # all chunks go at once, beside the training's traffic
        self.meter = LinkMeter()
        self.journal: deque[Sent] = deque(maxlen=_JOURNAL)
        self.sent: deque[int] = deque(maxlen=4)  # bytes that a copy took on the network, to one holder each
        self.copies: deque[tuple[float, float, int]] = deque(maxlen=_COPIES)  # (from, to, bytes) into the own slot
        self._progress_at = self._arrived_at = 0.0
        self._looked_at = -1.0
        self.spilled_bytes = 0  # bytes of the version in transfer that were sent only when it was due
        self._version = 0
        self._now = 0
        self._begun_at = 0.0
        self._lengths: deque[float] = deque(maxlen=_LENGTHS)
        self._stepped_at: float | None = None
        self.used_pause = False  # deferred chunks were sent in a pause of this iteration, without `hurry`
        self._passed = (-1, 0.0)  # the iteration whose gate was passed last, and the time
        self._hurry = threading.Event()
        self._asked = False  # the host of the training waits for the version; its device may arrive much later
        self._ending = False
        self._flow: GrantOutbox | None = None  # the link on which bytes go now
        self._beside = False  # the training has traffic beside the bytes that go now
        self._crowded = False  # the sending thread waits for the next acknowledgement
        self._table: Timetable | None = None

    # ---- from the training's thread --------------------------------------------------------------------

    def begin_iteration(self, version: int) -> None:
        """Record that the iteration after step() number `version` begins."""
        now = self._clock()
        if self._stepped_at is not None:
            self._lengths.append(now - self._stepped_at)
        self._stepped_at, self._now, self.used_pause = now, version, False
        self.wake()

    def record_gate_passed(self) -> None:
        """Record that the training passes the optimizer's hook."""
        self._passed = (self._now, self._clock())

    def hurry(self) -> None:
        """Send the version in transfer at once."""
        self._hurry.set()
        self.wake()

    def record_wait(self) -> None:
        """Record that the training waits for the version in transfer, or will once its device has arrived."""
        self._asked, self._looked_at = True, -1.0
        if self._has_arrived():
            self.hurry()
        else:
            self.wake()

    def end(self) -> None:
        """Send everything at once from now on, because the training is over."""
        self._ending = True
        self.hurry()

    @property
    def arrived_at(self) -> float:
        """Return when the training's device arrived where the host waits; the current time until then.

        Return 0 where the training computes on the host.
        """
        now = self._clock()
        if now - self._looked_at >= _SOON_S:  # a wait for a seal polls more often than that
            self._looked_at = now
            if not self._has_arrived():
                self._arrived_at = now
        return self._arrived_at

    @property
    def progress_at(self) -> float:
        """Return when something of the version last arrived, or the device arrived where the host waits."""
        flow = self._flow
        return max(self._progress_at, self.arrived_at, flow.moved_at if flow is not None else 0.0)

    def _has_arrived(self) -> bool:
        place = self.traffic.find_place() if self.traffic is not None and self._asked else None
        return place is None or place.at_gate

    def wake(self) -> None:
        """Interrupt waits for a span, so that the sending thread checks again."""
        if self.traffic is not None:
            self.traffic.wake()

    # ---- from the sending thread -----------------------------------------------------------------------

    def wait_for_lull(self, version: int, seconds: float, is_wanted: Callable[[], bool]) -> None:
        """Block until the training's processors are probably idle: in the first span of at least `seconds`.

        Return at once where there is no such span, or all idle time is needed to send. Return early once
        `is_wanted()` is true and `wake` is called. If the span has begun, this may take the milliseconds that are
        left out at its beginning.

        Between collectives right after step(), the training mostly runs Python, which executes in one thread at a
        time.
        """
        table, traffic = self.timetable, self.traffic
        window = table.find_lull(seconds) if table is not None and not self._ending else None
        if table is None or window is None or traffic is None:
            return
        until = self._clock() + table.usual_s / 2
        while self._now == version and not is_wanted() and self._clock() < until:
            if traffic.launched > window.after:
                return
            if traffic.wait_span(window.after, _SPAN_S):
                begins = traffic.find_quiet_start() + window.delay_s
                self._hurry.wait(min(_LOOK_S, max(0.0, begins - self._clock())))
                return

    def begin_version(self, version: int) -> None:
        """Prepare to send the chunks of this version."""
        self._version, self._table, self.spilled_bytes = version, self.timetable, 0
        self.record_progress()
        self._begun_at = self._clock()
        self._asked = False
        self._hurry.clear()
        if self._ending:
            self._hurry.set()

    def record_progress(self) -> None:
        """Record that something of the version has arrived, so that a wait for it does not time out."""
        self._progress_at = self._clock()

    def list_chunk_sizes(self, replica: int, used_bytes: int) -> tuple[int, ...]:
        """Return the sizes of the chunks of `used_bytes` bytes in order, for transports that announce them."""
        if self._table is None or replica >= len(self._table.chunks):
            head = min(PROBE_BYTES, used_bytes)
            return tuple(
                n for n in (head, *(length for _, length in cut_chunks(used_bytes - head, self.chunk_bytes))) if n
            )
        sizes: list[int] = []
        left = used_bytes
        for _, size in self._table.chunks[replica]:
            if left:
                sizes.append(min(size, left))
                left -= sizes[-1]
        sizes += [length for _, length in cut_chunks(left, self.chunk_bytes)]
        return tuple(sizes)

    def deliver(self, replica: int, total: int, flow: GrantOutbox) -> None:
        """Grant the bytes of a version in its windows, until only bytes are left that may go at once.

        Args:
            replica: Number of the replica.
            total: Bytes to send.
            flow: The link.

        Raises:
            LinkBroken: The version is lost.
        """
        self._flow, self._beside = flow, self.unscheduled
        while (sent := flow.sent) < total:
            wait = self._wait_for_window(replica, sent, total - sent, flow)
            if wait is None:
                self.spilled_bytes += total - flow.sent
                break
            if not wait.before:
                break
            until = sent + wait.size
            flow.grant(Grant(until, wait.before, wait.rate))
            self._wait_granted(wait, flow, until, total)
            flow.withdraw()
            self._record(replica, flow)
        traffic = self.traffic
        self._beside = self.unscheduled or (traffic is not None and traffic.count_in_flight() > 0)

    @property
    def copy_bytes(self) -> tuple[int, int]:
        """Return the least and the most bytes that a recent copy took on the network; (0, 0) if unknown."""
        sent = list(self.sent)
        return (min(sent), max(sent)) if len(sent) == self.sent.maxlen else (0, 0)

    def record_delivery(self, replica: int) -> None:
        """Record that all bytes of a version have arrived."""
        flow, self._flow = self._flow, None
        if flow is not None:
            self._record(replica, flow)

    def _record(self, replica: int, flow: GrantOutbox) -> None:
        for size, sent_at, acked_at in flow.read_spells():
            self.meter.record_spell(size, acked_at - sent_at, beside=self._beside)
            self.journal.append(Sent(self._version, replica, size, sent_at, acked_at, self._hurry.is_set()))
        if flow.arrived == flow.sent:
            self._beside = self.unscheduled

    def _wait_for_window(self, replica: int, offset: int, left: int, flow: GrantOutbox) -> _Wait | None:
        """Wait until bytes may go. Return how many and until when; None if the version is due."""
        most = left if self.p > 1 else min(left, self.chunk_bytes)
        if self._table is None and not offset:
            most = min(most, PROBE_BYTES)
        least = min(most, max(LEAST_BYTES, self.chunk_bytes // _LEAST_SHARE))
        while not self._is_due():
            flow.check()
            wait = self._compute_wait(replica, offset, least, most, flow.sent - flow.arrived)
            if wait.seconds <= 0:
                return wait
            if wait.after < 0 or self.traffic is None or wait.crowded:
                self._hurry.wait(min(wait.seconds, _SOON_S if self._asked or wait.crowded else _LOOK_S))
            else:
                self.traffic.wait_span(wait.after, _SOON_S if self._asked else _SPAN_S)
        return None

    def _wait_granted(self, wait: _Wait, flow: GrantOutbox, until: int, total: int) -> None:
        """Wait until the bytes of a grant have arrived, or may go no longer. The last ones only have to be sent."""
        traffic, number, late_s = self.traffic, self._now, 0.0
        while not self._is_due() and self._now == number:
            flow.check()
            now = self._clock()
            if flow.arrived >= until or flow.sent >= total or now >= wait.before:
                return
            pause_s = min(wait.before - now, max(_SOON_S, late_s or (until - flow.arrived) / wait.rate))
            late_s = 2 * max(_SOON_S, late_s)
            if traffic is None or wait.launched < 0:
                self._hurry.wait(pause_s)
            elif traffic.wait_launch(wait.launched, pause_s):
                self._beside = True
                return

    def wait_for_turn(self, replica: int, offset: int, size: int, backlog_bytes: Callable[[], int]) -> None:
        """Block until a chunk of fixed size may go.

        Args:
            replica: Number of the replica.
            offset: First byte of the chunk.
            size: Size of the chunk in bytes.
            backlog_bytes: Returns the bytes that were sent before and are not yet acknowledged.
        """
        while not self._is_due():
            backlog = backlog_bytes()
            wait = self._compute_wait(replica, offset, size, size, backlog)
            if wait.seconds <= 0:
                return
            self._crowded = wait.crowded
            if wait.crowded and backlog_bytes() < backlog:  # an acknowledgement arrived meanwhile
                continue
            if wait.after < 0 or self.traffic is None:
                self._hurry.wait(min(wait.seconds, _SOON_S if self._asked else _LOOK_S))
            else:
                self.traffic.wait_span(wait.after, _SOON_S if self._asked else _SPAN_S)
        self.spilled_bytes += size

    def _is_due(self) -> bool:
        if self._asked and not self._hurry.is_set() and self._has_arrived():
            self._hurry.set()
        return self._hurry.is_set()

    def record_send(self, time_s: float) -> None:
        """Record that a chunk is sent."""
        traffic = self.traffic
        self.meter.record_send(
            time_s, shared=self.unscheduled or (traffic is not None and traffic.count_in_flight() > 0)
        )

    def record_ack(self, replica: int, size: int, sent_at: float) -> None:
        """Record that a chunk was acknowledged now and is no longer in the backlog."""
        now = self._clock()
        self.meter.record_ack(size, now)
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
        return not traffic.count_in_flight() and self._clock() - traffic.find_quiet_start() > max(
            _PAUSE_S, patience_s
        )

    def _find_place(self, traffic: CollectiveMonitor) -> tuple[tuple[int, int, bool], float]:
        """Return the training's position, and when it passed the gate.

        The position is (iterations since the version's step(), collectives launched in this one, whether past the
        gate).
        """
        place = traffic.find_place()
        if place is None:
            passed, passed_at = self._passed
            return (self._now - self._version, traffic.launched, passed == self._now), passed_at
        gated = place.passed_at is not None
        return (self._now - place.behind - self._version, place.launched, gated), place.passed_at or 0.0

    def _compute_wait(self, replica: int, offset: int, least: int, most: int, backlog_bytes: int) -> _Wait:
        table, traffic = self._table, self.traffic
        if table is None:
            # the probe disturbs nothing, and measures alpha only where no other rank's copies are in flight
            probe = not offset and most <= PROBE_BYTES
            if not self.deferred or (probe and traffic is not None and not traffic.count_in_flight()):
                return _Wait(0.0, size=most, before=self._clock() + _SPAN_S if probe else 0.0)
            pauses = self._pauses()
            self.used_pause |= pauses
            return self._allow_all(most) if pauses else _Wait(_LOOK_S, size=most)
        if traffic is None:
            return _Wait(_LOOK_S)
        place, passed_at = self._find_place(traffic)
        gated = place[2]
        flying = traffic.count_in_flight()  # read last, so that a collective launched meanwhile is counted
        if self._clock() - self._begun_at > table.usual_s and not flying:
            return self._allow_all(most)  # the training pauses or does something else, perhaps for long
        window_number = max(table.find_planned_window(replica, offset), bisect_left(table.places, place))
        crowded = False
        if window_number < len(table.windows) and not flying and table.places[window_number][:2] == place[:2]:
            if table.places[window_number][2] != gated:
                return _Wait(_SOON_S)
            now = self._clock()
            elapsed = now - max(traffic.find_quiet_start(), passed_at if gated else 0.0)
            while window_number < len(table.windows) and table.places[window_number] == place:
                window = table.windows[window_number]
                left_s = window.delay_s + window.length_s - elapsed
                left = table.compute_room(left_s, 0)
                if left - backlog_bytes >= least:
                    planned = max(least, table.find_planned_end(replica, window_number) - offset)
                    size = min(left - backlog_bytes, most, planned)
                    before = now + left_s - table.alpha
                    return _Wait(max(0.0, window.delay_s - elapsed), -1, size, before, table.B, place[1])
                crowded = crowded or left >= least
                window_number += 1
        if window_number >= len(table.windows) or table.places[window_number][0] != place[0]:
            return _Wait(_LOOK_S)
        if table.places[window_number][1] == place[1] and not flying:
            return _Wait(_SOON_S)
        return _Wait(_LOOK_S, table.places[window_number][1], crowded=crowded)

    def _allow_all(self, most: int) -> _Wait:
        """Return what may go while the training pauses: all, for a while, until a collective is launched."""
        launched = self.traffic.launched if self.traffic is not None else -1
        return _Wait(0.0, -1, most, self._clock() + _SPAN_S, launched=launched)
