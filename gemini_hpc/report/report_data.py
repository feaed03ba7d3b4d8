"""The contents of a report: of each training one rank, its state, one iteration, and its overhead over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gemini_hpc.query.ask import Recorded
from gemini_hpc.query.inspect_document import fields, traffic
from gemini_hpc.wire.inspect_schema import InspectPart, RecordAsk
from gemini_hpc.wire.traffic import Point, TimelineState, TrafficState

SCHEMA = 1
MAX_SETS = 16


@dataclass(frozen=True)
class Shown:
    """The data of one rank of a training.

    A timeline of None means that no iteration has been recorded (by a rank of this version).
    """

    set: str
    rank: int
    host: str
    state: TrafficState
    timeline: TimelineState | None
    series: tuple[Point, ...]


def choose(parts: Sequence[InspectPart], name: str | None, rank: int | None) -> list[tuple[str, RecordAsk]]:
    """Return the hosts to query, and the rank and training to ask each for.

    The rank is the one with the largest overhead of each training, unless `rank` or `name` selects another.
    """
    names = sorted({s.name for p in parts for s in p.trainings if name is None or s.name == name})
    wanted = []
    for found in names:
        ranks = traffic(found, parts)
        if rank is not None:
            ranks = {r: told for r, told in ranks.items() if r == rank}
        if ranks:
            worst = max(sorted(ranks), key=lambda r: _overhead(ranks[r][1]))
            wanted.append((ranks[worst][0], RecordAsk(found, worst)))
    return wanted[:MAX_SETS]


def _overhead(state: TrafficState) -> float:
    return -2.0 if state.overhead is None else state.overhead


def shown(parts: Sequence[InspectPart], recorded: Iterable[Recorded]) -> list[Shown]:
    """Return the recorded answers, combined with the states that were reported before them."""
    found = []
    for answer in recorded:
        told = traffic(answer.ask.set, parts).get(answer.ask.rank)
        if told is None:
            continue
        record = answer.record
        timeline, series = (record.timeline, record.series) if record is not None else (None, ())
        series = tuple(sorted(series, key=lambda point: point.t))
        found.append(Shown(answer.ask.set, answer.ask.rank, answer.host, told[1], timeline, series))
    return found


def document(job: int, t: float, sets: Iterable[Shown]) -> dict[str, Any]:
    """Return the data of the drawings as JSON (see docs/json.md)."""
    return {
        "schema": SCHEMA,
        "job": job,
        "t": t,
        "trainings": [
            {
                "set": one.set,
                "rank": one.rank,
                "host": one.host,
                "traffic": fields(one.state),
                "timeline": None if one.timeline is None else _timeline(one.timeline),
                "series": [msgspec.structs.asdict(point) for point in one.series],
            }
            for one in sets
        ],
    }


def _timeline(timeline: TimelineState) -> dict[str, Any]:
    plain = msgspec.structs.asdict(timeline)
    return {
        key: [msgspec.structs.asdict(item) for item in value] if isinstance(value, tuple) else value
        for key, value in plain.items()
    }


def idle(timeline: TimelineState) -> list[tuple[float, float]]:
    """Return the time spans in which no collective of the training was running."""
    gaps, busy_until = [], 0.0
    for op in sorted(timeline.ops, key=lambda op: op.start_s):
        if op.start_s > busy_until:
            gaps.append((busy_until, op.start_s))
        busy_until = max(busy_until, op.end_s)
    if busy_until < timeline.iteration_s:
        gaps.append((busy_until, timeline.iteration_s))
    return gaps
