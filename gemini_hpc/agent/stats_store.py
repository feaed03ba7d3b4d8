"""What training ranks have told this agent of their traffic, and what they gave it to keep.

It belongs to no incarnation: recovery rounds and requeues leave it, for as long as this agent lives. What is told is
kept packed (an iteration of hundreds of operations would take several times as much as objects). A rank has some
110 KiB at most; of all ranks together MAX_TOTAL_BYTES are kept, and that which has been silent longest goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import msgspec

from gemini_hpc.wire import inspect_schema
from gemini_hpc.wire.traffic import Point, TimelineState, TrafficState

MAX_TOTAL_BYTES = 32 << 20
MAX_POINTS = 720
MAX_SHOWN = 1024  # ranks of a set in one picture; more cannot be connected
_STATE_BYTES = 2048  # of a summary as an object, and of what holds all this together


class Series:
    """The overhead over time, at most MAX_POINTS of it: the older the coarser."""

    def __init__(self) -> None:
        self._t, self._overhead, self._j = array("d"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self._t)

    def add(self, t: float, overhead: float, j: int) -> None:
        """One point; where there is no room, every second one of the older half goes."""
        if len(self._t) >= MAX_POINTS:
            half = MAX_POINTS // 2
            for column in (self._t, self._overhead, self._j):
                column[:half] = column[:half:2]
        self._t.append(t)
        self._overhead.append(overhead)
        self._j.append(j)

    def points(self) -> tuple[Point, ...]:
        """In the order in which they came."""
        rows = zip(self._t, self._overhead, self._j, strict=True)
        return tuple(Point(t, overhead, int(j)) for t, overhead, j in rows)


class _Rank:
    def __init__(self) -> None:
        self.state: TrafficState | None = None
        self.timeline = b""
        self.series = Series()
        self.key, self.kept = "", b""

    @property
    def size_bytes(self) -> int:
        return _STATE_BYTES + len(self.timeline) + 24 * len(self.series) + len(self.kept)


class StatsStore:
    """By set and rank."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[tuple[str, int], _Rank] = OrderedDict()
        self._bytes = 0

    def traffic(self, name: str, rank: int, state: TrafficState) -> None:
        """A rank's newest summary."""
        told, before = self._told(name, rank)
        told.state = state
        if state.overhead is not None:
            told.series.add(state.t, state.overhead, state.j)
        self._grown(told, before)

    def timeline(self, name: str, rank: int, timeline: TimelineState) -> None:
        """A rank's newest iteration."""
        told, before = self._told(name, rank)
        told.timeline = msgspec.msgpack.encode(timeline)
        self._grown(told, before)

    def keep(self, name: str, rank: int, key: str, data: bytes) -> None:
        """In the place of what was kept before."""
        told, before = self._told(name, rank)
        told.key, told.kept = key, data
        self._grown(told, before)

    def recall(self, name: str, rank: int, key: str) -> bytes | None:
        """What was kept with this key; what was kept with another one is of no use any more, and goes."""
        told = self._ranks.get((name, rank))
        if told is None or not told.key:
            return None
        if told.key == key:
            return told.kept
        before = told.size_bytes
        told.key, told.kept = "", b""
        self._grown(told, before)
        return None

    def begun(self, name: str, rank: int) -> None:
        """A new process of this rank: the summary of the one before says nothing of it."""
        told = self._ranks.get((name, rank))
        if told is not None:
            told.state = None

    def states(self, name: str, ranks: Iterable[int]) -> tuple[tuple[int, TrafficState], ...]:
        """The summaries of those of these ranks that have told one, in order."""
        known = ((rank, self._ranks.get((name, rank))) for rank in sorted(ranks))
        found = ((rank, told.state) for rank, told in known if told is not None and told.state is not None)
        return tuple(islice(found, MAX_SHOWN))

    def record(self, ask: inspect_schema.RecordAsk) -> inspect_schema.Record | None:
        """What a rank has recorded; None where it has told nothing here."""
        told = self._ranks.get((ask.set, ask.rank))
        if told is None:
            return None
        timeline = msgspec.msgpack.decode(told.timeline, type=TimelineState) if told.timeline else None
        return inspect_schema.Record(ask.set, ask.rank, timeline, told.series.points())

    def _told(self, name: str, rank: int) -> tuple[_Rank, int]:
        told = self._ranks.get((name, rank))
        if told is None:
            told = self._ranks[name, rank] = _Rank()
            return told, 0
        self._ranks.move_to_end((name, rank))
        return told, told.size_bytes

    def _grown(self, told: _Rank, before_bytes: int) -> None:
        self._bytes += told.size_bytes - before_bytes
        while self._bytes > MAX_TOTAL_BYTES:
            _, oldest = self._ranks.popitem(last=False)
            self._bytes -= oldest.size_bytes
