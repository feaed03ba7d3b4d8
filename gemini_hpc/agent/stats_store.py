"""Traffic reports of training ranks, and data that ranks gave this agent to keep.

The store belongs to no incarnation: it survives recovery rounds and requeues, for as long as this agent lives.
Reports are kept packed, because an iteration of hundreds of operations would take several times as much as objects. A
rank has at most some 110 KiB. The store keeps MAX_TOTAL_BYTES of all ranks together, and drops the longest silent
rank first.
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
MAX_SHOWN = 1024  # ranks of a training in one view; more cannot be connected
_STATE_BYTES = 2048  # bytes of a summary as an object, and of the store's own structures


class OverheadSeries:
    """A series of the overhead over time, at most MAX_POINTS long. Older points are sparser."""

    def __init__(self) -> None:
        self._t, self._overhead, self._j, self._saved = array("d"), array("d"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self._t)

    def add(self, t: float, overhead: float, j: int, saved: int) -> None:
        """Add one point. Without room, drop every second point of the older half."""
        if len(self._t) >= MAX_POINTS:
            half = MAX_POINTS // 2
            for column in (self._t, self._overhead, self._j, self._saved):
                column[:half] = column[:half:2]
        self._t.append(t)
        self._overhead.append(overhead)
        self._j.append(j)
        self._saved.append(saved)

    def list_points(self) -> tuple[Point, ...]:
        """Return the points in the order of their arrival."""
        rows = zip(self._t, self._overhead, self._j, self._saved, strict=True)
        return tuple(Point(t, overhead, int(j), int(saved)) for t, overhead, j, saved in rows)


class _Rank:
    def __init__(self) -> None:
        self.state: TrafficState | None = None
        self.timeline = b""
        self.series = OverheadSeries()
        self.key, self.kept = "", b""

    @property
    def size_bytes(self) -> int:
        return _STATE_BYTES + len(self.timeline) + 32 * len(self.series) + len(self.kept)


class StatsStore:
    """The reports of ranks, by training and rank."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[tuple[str, int], _Rank] = OrderedDict()
        self._bytes = 0

    def store_traffic(self, name: str, rank: int, state: TrafficState, saved: int = 0) -> None:
        """Store a rank's newest summary. `saved` is the newest sealed version of the training."""
        entry, before = self._open_entry(name, rank)
        entry.state = state
        if state.overhead is not None:
            entry.series.add(state.t, state.overhead, state.j, saved)
        self._record_growth(entry, before)

    def store_timeline(self, name: str, rank: int, timeline: TimelineState) -> None:
        """Store a rank's newest iteration."""
        entry, before = self._open_entry(name, rank)
        entry.timeline = msgspec.msgpack.encode(timeline)
        self._record_growth(entry, before)

    def store_data(self, name: str, rank: int, key: str, data: bytes) -> None:
        """Keep a rank's data in place of its earlier data."""
        entry, before = self._open_entry(name, rank)
        entry.key, entry.kept = key, data
        self._record_growth(entry, before)

    def recall(self, name: str, rank: int, key: str) -> bytes | None:
        """Return the data kept with this key. Data kept with another key is useless now and dropped."""
        entry = self._ranks.get((name, rank))
        if entry is None or not entry.key:
            return None
        if entry.key == key:
            return entry.kept
        before = entry.size_bytes
        entry.key, entry.kept = "", b""
        self._record_growth(entry, before)
        return None

    def drop_summary(self, name: str, rank: int) -> None:
        """Drop the summary of a rank that has a new process: it does not describe the new one."""
        entry = self._ranks.get((name, rank))
        if entry is not None:
            entry.state = None

    def list_summaries(self, name: str, ranks: Iterable[int]) -> tuple[tuple[int, TrafficState], ...]:
        """Return the summaries of those ranks that have sent one, in order."""
        known = ((rank, self._ranks.get((name, rank))) for rank in sorted(ranks))
        found = ((rank, entry.state) for rank, entry in known if entry is not None and entry.state is not None)
        return tuple(islice(found, MAX_SHOWN))

    def build_record(self, ask: inspect_schema.RecordAsk) -> inspect_schema.Record | None:
        """Return a rank's record, or None if the rank has reported nothing here."""
        entry = self._ranks.get((ask.training, ask.rank))
        if entry is None:
            return None
        timeline = msgspec.msgpack.decode(entry.timeline, type=TimelineState) if entry.timeline else None
        return inspect_schema.Record(ask.training, ask.rank, timeline, entry.series.list_points())

    def _open_entry(self, name: str, rank: int) -> tuple[_Rank, int]:
        entry = self._ranks.get((name, rank))
        if entry is None:
            entry = self._ranks[name, rank] = _Rank()
            return entry, 0
        self._ranks.move_to_end((name, rank))
        return entry, entry.size_bytes

    def _record_growth(self, entry: _Rank, before_bytes: int) -> None:
        self._bytes += entry.size_bytes - before_bytes
        while self._bytes > MAX_TOTAL_BYTES:
            _, oldest = self._ranks.popitem(last=False)
            self._bytes -= oldest.size_bytes
