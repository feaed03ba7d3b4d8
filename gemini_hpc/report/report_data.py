"""The contents of a report: of each training one rank, its state, one iteration, and its overhead over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gemini_hpc.durations import format_age
from gemini_hpc.query.ask import Recorded
from gemini_hpc.query.inspect_document import build_traffic_fields, collect_traffic
from gemini_hpc.wire.inspect_schema import EventRecord, InspectPart, RecordAsk
from gemini_hpc.wire.traffic import Point, TimelineState, TrafficState

SCHEMA = 1
MAX_TRAININGS = 16
LOSSES = ("detected",)  # events of a node that is silent to its peers
RESUMES = ("resumed",)
_MOST_MARKS = 200
_SAME_AGE_S = 10.0  # agents of one allocation start within the time that a prolog may take


@dataclass(frozen=True)
class Shown:
    """The data of one rank of a training.

    A timeline of None means that no iteration has been recorded (by a rank of this version).

    Attributes:
        saved: Newest sealed version of the training; 0: none.
        saved_at: Unix time at which a copy of that version was complete; None: unknown.
        marks: The job's losses and resumes, in the order of time; several ranks' resumes of a version are one.
        history: (time, newest sealed version), recorded by the rank that the oldest agent serves.
    """

    training: str
    rank: int
    host: str
    state: TrafficState
    timeline: TimelineState | None
    series: tuple[Point, ...]
    saved: int = 0
    saved_at: float | None = None
    marks: tuple[EventRecord, ...] = ()
    history: tuple[tuple[float, int], ...] = ()


def choose_ranks(parts: Sequence[InspectPart], name: str | None, rank: int | None) -> list[tuple[str, RecordAsk]]:
    """Return the hosts to query, and the rank and training to ask each for.

    The first rank of a training is the one with the largest overhead, unless `rank` or `name` selects another. If its
    agent is not the oldest, because it replaces a lost node, a rank of the oldest agent follows for the history.
    """
    ages = {part.host: min((event.t for event in part.events), default=math.inf) for part in parts}
    names = sorted({s.name for p in parts for s in p.trainings if name is None or s.name == name})
    wanted = []
    for found in names:
        everyone = collect_traffic(found, parts)
        ranks = {r: traffic for r, traffic in everyone.items() if rank in (None, r)}
        if ranks:
            drawn = max(sorted(ranks), key=lambda r: _read_overhead(ranks[r][1]))
            oldest = min(everyone, key=lambda r: (ages[everyone[r][0]], r))
            older = ages[everyone[oldest][0]] < ages[everyone[drawn][0]] - _SAME_AGE_S
            wanted.append([(everyone[r][0], RecordAsk(found, r)) for r in ([drawn, oldest] if older else [drawn])])
    return [ask for asks in wanted[:MAX_TRAININGS] for ask in asks]


def _read_overhead(state: TrafficState) -> float:
    return -2.0 if state.overhead is None else state.overhead


def combine_answers(parts: Sequence[InspectPart], recorded: Iterable[Recorded]) -> list[Shown]:
    """Return the recorded answers, combined with the states that were reported before them."""
    found: list[Shown] = []
    answers: dict[str, list[Recorded]] = {}
    for answer in recorded:
        answers.setdefault(answer.ask.training, []).append(answer)
    for answer, *others in answers.values():
        traffic = collect_traffic(answer.ask.training, parts).get(answer.ask.rank)
        if traffic is None:
            continue
        record = answer.record
        timeline, series = (record.timeline, record.series) if record is not None else (None, ())
        series = tuple(sorted(series, key=lambda point: point.t))
        longest = next((one.record.series for one in others if one.record is not None), series)
        history = tuple((point.t, point.saved) for point in longest if point.saved)
        name = answer.ask.training
        saved = _find_newest_save(name, parts)
        found.append(
            Shown(
                name, answer.ask.rank, answer.host, traffic[1], timeline, series, *saved, _list_marks(parts), history
            )
        )
    return found


def _find_newest_save(name: str, parts: Sequence[InspectPart]) -> tuple[int, float | None]:
    """Return a training's newest sealed version, and the time at which its last copy was complete."""
    stamps = [state.sealed for part in parts for state in part.trainings if state.name == name and state.sealed]
    if not stamps:
        return 0, None
    newest = max(stamps)
    slots = [slot for part in parts for slot in part.held if slot.training == name and slot.stamp == newest]
    return newest.version, max((slot.since for slot in slots if slot.state == "complete"), default=None)


def _list_marks(parts: Sequence[InspectPart]) -> tuple[EventRecord, ...]:
    found: dict[tuple[str, int, int], EventRecord] = {}
    for event in sorted((event for part in parts for event in part.events), key=lambda event: event.t):
        if event.name in LOSSES or event.name in RESUMES:
            found.setdefault((event.name, event.restart, event.version), event)
    return tuple(found.values())[-_MOST_MARKS:]


def list_saved_steps(shown: Shown) -> list[tuple[float, int]]:
    """Return (time, newest saved step), in the order of time, from samples and resumes."""
    steps = list(shown.history)
    steps += [(event.t, event.version) for event in shown.marks if event.name in RESUMES and event.version]
    if shown.saved and shown.saved_at is not None:
        steps.append((shown.saved_at, shown.saved))
    return sorted(steps)


def describe_saves(shown: Shown, t: float) -> str:
    """Return the sentence under the first picture: the newest save, its age, and what happened so far."""
    if not shown.saved:
        return "No step is saved yet: a failure now begins the training anew."
    age = "" if shown.saved_at is None else f", {format_age(t - shown.saved_at)} ago"
    lost, resumed = (sum(event.name in names for event in shown.marks) for names in (LOSSES, RESUMES))
    return (
        f"The newest save is step {shown.saved}{age}. So far: {lost or 'no'} loss{'es' * (lost != 1)}, "
        f"{resumed or 'no'} resume{'s' * (resumed != 1)}."
    )


def build_document(job: int, t: float, trainings: Iterable[Shown]) -> dict[str, Any]:
    """Return the data of the drawings as JSON (see docs/json.md)."""
    return {
        "schema": SCHEMA,
        "job": job,
        "t": t,
        "trainings": [
            {
                "training": one.training,
                "rank": one.rank,
                "host": one.host,
                "traffic": build_traffic_fields(one.state),
                "timeline": None if one.timeline is None else _build_timeline(one.timeline),
                "saved": one.saved,
                "saved_age_s": None if one.saved_at is None else max(0.0, t - one.saved_at),
                "steps": [{"t": when, "version": version} for when, version in list_saved_steps(one)],
                "marks": [{"t": event.t, "name": event.name, "version": event.version} for event in one.marks],
                "series": [msgspec.structs.asdict(point) for point in one.series],
            }
            for one in trainings
        ],
    }


def _build_timeline(timeline: TimelineState) -> dict[str, Any]:
    plain = msgspec.structs.asdict(timeline)
    return {
        key: [msgspec.structs.asdict(item) for item in value] if isinstance(value, tuple) else value
        for key, value in plain.items()
    }


def list_idle_spans(timeline: TimelineState) -> list[tuple[float, float]]:
    """Return the time spans in which no collective of the training was running."""
    gaps, busy_until = [], 0.0
    for op in sorted(timeline.ops, key=lambda op: op.start_s):
        if op.start_s > busy_until:
            gaps.append((busy_until, op.start_s))
        busy_until = max(busy_until, op.end_s)
    if busy_until < timeline.iteration_s:
        gaps.append((busy_until, timeline.iteration_s))
    return gaps
