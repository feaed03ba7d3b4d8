"""From the times of collectives to the idle spans that Algorithm 2 fills (GEMINI paper, section 5.4).

An iteration runs from one step() of the checkpointer to the next. The *gate* in it is the pre-hook of the optimizer:
a checkpoint that must be complete before the optimizer's step can only use what is idle before it; what is idle after
it can take a checkpoint that is spread over several iterations. A span is named by the number of collectives that
were launched before it, which is what a sender sees at run time: it need not trust the clock for where it is.

1. `idle`: one iteration's gaps. 2. `summarize`: those of several iterations, as the profile to plan with.
3. `waiting`: with the wait that a stage of a pipeline begins with. 4. `intersect`: the windows in which the other end
is idle as well. 5. `timeline`: T of Algorithm 2. 6. `drifted`: whether the profile still describes the training.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from math import inf
from statistics import fmean, median, median_low, pstdev
from typing import NamedTuple

# The share of iterations that may be shorter of idle time than what is planned with. The minimum would be one
# outlier's in 20 iterations, the mean is exceeded by every second iteration: then a chunk is late and delays a
# collective.
LOW_SHARE = 0.1
# A change of idle time that is less than this share of the iteration moves no plan.
NEGLIGIBLE = 0.01


class Op(NamedTuple):
    """One collective. `kind` says what it is (a hash of its name, process group and size), so that iterations can be
    told apart; both times count from the iteration's start."""

    kind: int
    bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """One iteration: `started_s` by the node's clock, the other times from there. `ops` in order of launch; an op may
    end after the iteration."""

    started_s: float
    length_s: float
    gate_s: float
    ops: tuple[Op, ...]


class Gap(NamedTuple):
    """Idle time after the first `after` ops of an iteration; length 0 where the next is launched before they end."""

    after: int
    before_gate: bool
    start_s: float
    length_s: float


class Span(NamedTuple):
    """A gap over several iterations: `length_s` to plan with, `mean_s` to compare with."""

    after: int
    before_gate: bool
    start_s: float
    length_s: float
    mean_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.length_s


@dataclass(frozen=True, slots=True)
class Profile:
    """What a training's iterations have in common. `pattern` is the hash of its ops' kinds in order (64 bits, the
    same on every machine), `ops` their number. `spans` follow each other in time without overlap, those before the
    gate first; the last of these ends in the gate and is always there. `idle_s` is the sum of their planned lengths,
    `dropped_s` the mean idle time of an iteration outside of them, `deviation` the normalized standard deviation of
    their lengths, weighted by length: below 0.1 in the paper."""

    pattern: int
    ops: int
    iterations: int
    iteration_s: float
    gate_s: float
    spans: tuple[Span, ...]
    idle_s: float
    dropped_s: float
    deviation: float

    @property
    def gate_span(self) -> Span:
        return [span for span in self.spans if span.before_gate][-1]


class Window(NamedTuple):
    """Idle at both ends: begins `delay_s` after my profile's spans[span] does, which comes after `after` ops. It is
    before the gate if it is before that of every rank, so not always where its span is."""

    span: int
    after: int
    before_gate: bool
    delay_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The windows of consecutive iterations up to the gate of the last: `T` of Algorithm 2. `windows` is the number
    of windows in a whole iteration."""

    T: tuple[float, ...]
    windows: int

    def at(self, index: int) -> tuple[int, int]:
        """Iteration (0 is the first) and index into the windows of the span T[index]. Raises ValueError if there is
        none."""
        if not 0 <= index < len(self.T):
            raise ValueError(f"span {index} is outside 0..{len(self.T) - 1}")
        return divmod(index, self.windows)


def pattern(ops: Iterable[Op]) -> int:
    """64-bit hash of the sequence of kinds."""
    digest = blake2b(digest_size=8)
    for op in ops:
        digest.update(struct.pack("<Q", op.kind & 0xFFFF_FFFF_FFFF_FFFF))
    return int.from_bytes(digest.digest(), "little")


def idle(trace: Trace) -> list[Gap]:
    """The gaps after 0, 1, ... all ops, in order, the one with the gate as two: len(ops) + 2 in all.

    A gap reaches from the end of all ops before it to the launch of the first after it, so ops may overlap. One that
    ends after the iteration keeps the beginning of the next busy: iterations are alike, so it is taken from this one.
    Raises ValueError for a gate outside the iteration or an op that ends before it starts.
    """
    length, gate, ops = trace.length_s, trace.gate_s, trace.ops
    if not 0 <= gate <= length:
        raise ValueError(f"the optimizer's step at {gate} s is outside an iteration of {length} s")
    for op in ops:
        if not 0 <= op.start_s <= op.end_s:
            raise ValueError(f"a collective from {op.start_s} to {op.end_s} s: it starts in the iteration, then ends")
    carried = max(0.0, max((op.end_s for op in ops), default=0.0) - length)
    starts = [min(end, length) for end in accumulate((op.end_s for op in ops), max, initial=carried)]
    launches = accumulate((op.start_s for op in reversed(ops)), min, initial=length)
    ends = [min(launch, length) for launch in launches][::-1]
    split = next((k for k, op in enumerate(ops) if op.start_s >= gate), len(ops))
    gaps = []
    for after, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if after <= split:
            begin = min(start, gate)
            gaps.append(Gap(after, True, begin, max(0.0, min(end, gate) - begin)))
        if after >= split:
            begin = max(start, gate)
            gaps.append(Gap(after, False, begin, max(0.0, end - begin)))
    return gaps


def summarize(traces: Sequence[Trace], *, floor_s: float = 0.0005, keep: int = 256) -> Profile:
    """The profile of iterations of one pattern. Spans shorter than `floor_s` are dropped, and of the others all but
    the `keep` longest; the one that ends in the gate stays, also if its length is 0.

    A span is planned with the length that all but a tenth of the iterations reach; of fewer than 10, the shortest.
    Raises ValueError for no trace, traces of different patterns and keep < 1.
    """
    if not traces:
        raise ValueError("no iterations to make a profile of")
    if keep < 1:
        raise ValueError(f"{keep} spans to keep: at least the one before the optimizer's step is needed")
    patterns = {pattern(trace.ops) for trace in traces}
    if len(patterns) > 1:
        raise ValueError(f"{len(traces)} iterations have {len(patterns)} different sequences of collectives")
    iterations = [idle(trace) for trace in traces]
    iteration_s = median(trace.length_s for trace in traces)
    gate_s = median(trace.gate_s for trace in traces)
    # Where the gate is among the ops may vary: a part that an iteration lacks has length 0 in it.
    gate_after = median_low([sum(gap.before_gate for gap in gaps) - 1 for gaps in iterations])
    ops = len(traces[0].ops)
    spans: dict[Span, list[float]] = {}
    for before_gate in (True, False):
        sides = [_side(gaps, before_gate, ops, trace.gate_s) for gaps, trace in zip(iterations, traces, strict=True)]
        for after in range(ops + 1):
            lengths = [side[after].length_s for side in sides]
            start = median(side[after].start_s for side in sides)
            spans[Span(after, before_gate, start, _low(lengths), fmean(lengths))] = lengths
    gate_span = next(span for span in spans if span.before_gate and span.after == gate_after)
    ranked = sorted(
        (span for span in spans if span != gate_span and span.length_s >= floor_s and span.length_s > 0),
        key=lambda span: (-span.length_s, span.start_s),
    )
    kept = sorted([gate_span, *ranked[: keep - 1]], key=lambda span: (not span.before_gate, span.after))
    mean_s = sum(span.mean_s for span in kept)
    return Profile(
        pattern=patterns.pop(),
        ops=ops,
        iterations=len(traces),
        iteration_s=iteration_s,
        gate_s=gate_s,
        spans=_apart(kept, gate_s, iteration_s),
        idle_s=sum(span.length_s for span in _apart(kept, gate_s, iteration_s)),
        dropped_s=max(0.0, fmean(sum(gap.length_s for gap in gaps) for gaps in iterations) - mean_s),
        deviation=sum(pstdev(spans[span]) for span in kept) / mean_s if mean_s > 0 else 0.0,
    )


def waiting(profile: Profile, lag_s: float) -> Profile:
    """The profile of a rank that begins its iterations `lag_s` earlier, and waits so much longer before its first
    collective.

    While iterations are recorded all ranks wait for each other at the optimizer, and go on together. Stages of a
    pipeline then wait there, where that is not counted, instead of in the bubble that they would find later.
    """
    if not lag_s > 0:
        return profile
    spans = profile.spans
    if spans[0].after or not spans[0].before_gate:
        spans = (Span(0, True, 0.0, 0.0, 0.0), *spans)
    first = spans[0]._replace(length_s=spans[0].length_s + lag_s, mean_s=spans[0].mean_s + lag_s)
    return replace(
        profile,
        iteration_s=profile.iteration_s + lag_s,
        gate_s=profile.gate_s + lag_s,
        spans=(first, *(span._replace(start_s=span.start_s + lag_s) for span in spans[1:])),
        idle_s=profile.idle_s + lag_s,
    )


def intersect(mine: Profile, others: Sequence[tuple[Profile, float]]) -> list[Window]:
    """The windows of my spans in which all others are idle, in order of time, those before the gate first.

    Each other comes with its shift: the start of its iteration minus the start of mine, in seconds by one clock. A
    rank's spans come again with every iteration of it. The gate that counts is the first to come of all ranks': what
    is sent later holds that rank's optimizer up. The last window before it is always there, possibly with length 0:
    it is the one that Algorithm 2 takes as infinite.
    """
    gate = max(0.0, min([mine.gate_s, *(shift + other.gate_s for other, shift in others)]))
    free = [(-inf, inf)]
    for other, shift in others:
        free = common(free, _periodic(other, shift, mine.iteration_s))
    ends = [end for _, end in free]
    closing = _closing(mine, gate)
    windows: list[Window] = []
    for before_gate in (True, False):
        for index, span in enumerate(mine.spans):
            first, last = _cut(span, before_gate, gate, mine.gate_s)
            overlap = free[bisect_right(ends, first) : bisect_left(ends, last) + 1]
            for start, end in common([(first, last)], overlap):
                # A length that nothing has cut stays as it is: computed anew, it would be rounded.
                length = span.length_s if (start, end) == (span.start_s, span.end_s) else end - start
                windows.append(Window(index, span.after, before_gate, start - span.start_s, length))
        if before_gate and (not windows or windows[-1].span != closing.span):
            windows.append(closing)
    return windows


def capped(mine: Profile, windows: Sequence[Window], others: Sequence[Profile]) -> list[Window]:
    """The same windows, as far as ranks of my pattern are idle in them too. These launch the same operations, so that
    a span of theirs begins when mine does, whatever any clock says: it comes after the same operation."""
    lengths = [{(span.after, span.before_gate): span.length_s for span in other.spans} for other in others]
    found = []
    for window in windows:
        span = mine.spans[window.span]
        room_s = min((known.get((span.after, span.before_gate), 0.0) for known in lengths), default=inf)
        found.append(window._replace(length_s=max(0.0, min(window.length_s, room_s - window.delay_s))))
    return found


def timeline(windows: Sequence[Window], s: int) -> Timeline:
    """The windows of s iterations up to the gate of the last one: whole iterations, then what comes before the gate.

    Raises ValueError for s < 1 and for windows of which those before the gate are not the first, or not there.
    """
    if s < 1:
        raise ValueError(f"{s} iterations to spread a checkpoint over: at least 1 is needed")
    before = sum(window.before_gate for window in windows)
    if before == 0 or not all(window.before_gate for window in windows[:before]):
        raise ValueError("an iteration's windows begin with those before the optimizer's step, at least one")
    lengths = tuple(window.length_s for window in windows)
    return Timeline(lengths * (s - 1) + lengths[:before], len(lengths))


def drifted(profile: Profile, trace: Trace, tolerance: float = 0.25) -> str:
    """Why the profile no longer describes the training, as a sentence; '' if it does.

    Other collectives, or another order: always. Idle time: if the changes of all spans, longer and shorter alike,
    come to more than `tolerance` of all idle time, or one span that holds at least that share of it has changed by
    more than `tolerance` of itself. A short span so counts for what it is. One iteration may be an outlier: ask about
    several.
    """
    if len(trace.ops) != profile.ops:
        return f"an iteration launches {len(trace.ops)} collectives, the profile has {profile.ops}"
    if pattern(trace.ops) != profile.pattern:
        return f"an iteration launches {profile.ops} collectives as in the profile, but others or in another order"
    now: dict[tuple[int, bool], float] = {(gap.after, gap.before_gate): gap.length_s for gap in idle(trace)}
    all_now = sum(now.values())
    changes = [(now.pop((span.after, span.before_gate), 0.0) - span.mean_s, span) for span in profile.spans]
    rest = sum(now.values()) - profile.dropped_s
    changed_s = abs(rest) + sum(abs(change) for change, _ in changes)
    idle_s = profile.dropped_s + sum(span.mean_s for span in profile.spans)
    negligible_s = NEGLIGIBLE * profile.iteration_s
    if changed_s > max(tolerance * idle_s, negligible_s):
        return (
            f"the idle spans of an iteration have changed by {changed_s:.3g} s in all, "
            f"from {idle_s:.3g} s to {all_now:.3g} s together"
        )
    for change, span in changes:
        if span.mean_s >= tolerance * idle_s and abs(change) > max(tolerance * span.mean_s, negligible_s):
            return (
                f"the idle span after {span.after} collectives has changed from {span.mean_s:.3g} s "
                f"to {span.mean_s + change:.3g} s"
            )
    return ""


def _side(gaps: list[Gap], before_gate: bool, ops: int, gate: float) -> list[Gap]:
    """An iteration's gaps on one side of the gate for every number of ops; those on the other side are empty
    there."""
    found = {gap.after: gap for gap in gaps if gap.before_gate == before_gate}
    return [found.get(after, Gap(after, before_gate, gate, 0.0)) for after in range(ops + 1)]


def _low(lengths: list[float]) -> float:
    return sorted(lengths)[int(len(lengths) * LOW_SHARE)]


def _apart(spans: list[Span], gate_s: float, iteration_s: float) -> tuple[Span, ...]:
    """Each start is a median of its own: a span is cut where the next one, the gate or the iteration's end is."""
    cut = []
    for span, following in zip(spans, [*spans[1:], None], strict=True):
        limit = gate_s if span.before_gate else iteration_s
        if following is not None and following.before_gate == span.before_gate:
            limit = min(limit, following.start_s)
        cut.append(span._replace(length_s=max(0.0, min(span.length_s, limit - span.start_s))))
    return tuple(cut)


def _cut(span: Span, before_gate: bool, gate: float, own_gate: float) -> tuple[float, float]:
    """The part of my span on one side of the gate that counts, which may be earlier than mine; none of it is there if
    the end is not after the start."""
    start, end = span.start_s, span.end_s
    if span.before_gate and gate < own_gate:
        return (start, min(end, gate)) if before_gate else (max(start, gate), end)
    return (start, end) if span.before_gate == before_gate else (start, start)


def _closing(mine: Profile, gate: float) -> Window:
    """The empty window at the end of my last span that has begun by the gate; before my first, if none has."""
    begun = sum(span.before_gate and span.start_s <= gate for span in mine.spans)
    index = max(0, begun - 1)
    span = mine.spans[index]
    return Window(index, span.after, True, max(0.0, min(span.end_s, gate) - span.start_s), 0.0)


def _periodic(profile: Profile, shift: float, until: float) -> list[tuple[float, float]]:
    """When a rank is idle between 0 and `until`: its spans of every iteration, as intervals that do not touch."""
    period = profile.iteration_s
    if not period > 0:
        raise ValueError(f"a profile with an iteration of {period} s")
    intervals: list[tuple[float, float]] = []
    begin = shift - (int(shift // period) + 1) * period
    while begin < until:
        for span in profile.spans:
            start, end = begin + span.start_s, begin + span.end_s
            if intervals and start <= intervals[-1][1]:
                intervals[-1] = (intervals[-1][0], max(end, intervals[-1][1]))
            elif span.length_s > 0:
                intervals.append((start, end))
        begin += period
    return intervals


def joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals in order, none of which touch, that cover the same as these."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def common(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What two lists of intervals, each in order, have in common."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return found
