"""Idle spans for Algorithm 2, computed from the times of collectives (GEMINI paper, section 5.4).

An iteration runs from one step() of the checkpointer to the next. The *gate* in it is the pre-hook of the optimizer.
A checkpoint that must be complete before the optimizer's step can only use the idle time before the gate. A
checkpoint spread over several iterations can also use the idle time after the gate. A span is named by the number of
collectives launched before it. A sender sees that number at run time, so it need not trust the clock for its
position.

1. `find_gaps` returns the gaps of one iteration.
2. `summarize_traces` returns those of several iterations as the profile to plan with.
3. `add_lag` adds the wait with which a stage of a pipeline begins.
4. `intersect_profiles` returns the windows in which the other end is idle as well.
5. `build_timeline` returns T of Algorithm 2.
6. `describe_drift` checks whether the profile still describes the training.
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

from gemini_hpc.core.ranges import merge_ranges

# Share of iterations that may have less idle time than planned. The minimum of 20 iterations would be an outlier's.
# The mean is missed by every second iteration, and then a chunk is late and delays a collective.
LOW_SHARE = 0.1
# A change of idle time below this share of the iteration does not change the plan.
NEGLIGIBLE = 0.01


class Op(NamedTuple):
    """A collective.

    `kind` is a hash of its name, process group and size, so that iterations can be distinguished. Both times are in
    seconds from the iteration's start.
    """

    kind: int
    bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """An iteration.

    Attributes:
        started_s: Start, by the node's clock. The other times count from there, in seconds.
        length_s: Length of the iteration.
        gate_s: Time of the gate.
        ops: Collectives in order of launch. An op may end after the iteration.
    """

    started_s: float
    length_s: float
    gate_s: float
    ops: tuple[Op, ...]


class Gap(NamedTuple):
    """Idle time after the first `after` ops of an iteration.

    Its length is 0 if the next op is launched before these end.
    """

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
        """Return the end of the span in seconds."""
        return self.start_s + self.length_s


@dataclass(frozen=True, slots=True)
class Profile:
    """The common properties of a training's iterations.

    Attributes:
        pattern: Hash of the ops' kinds in order (64 bits, the same on every machine).
        ops: Number of ops.
        iterations: Number of iterations summarized.
        iteration_s: Length of an iteration in seconds.
        gate_s: Time of the gate in seconds.
        spans: Spans in order of time without overlap, those before the gate first. The last of these ends in the
            gate and is always present.
        idle_s: Sum of the planned lengths of the spans.
        dropped_s: Mean idle time of an iteration outside the spans.
        deviation: Normalized standard deviation of the span lengths, weighted by length; below 0.1 in the paper.
    """

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
        """Return the span that ends in the gate."""
        return [span for span in self.spans if span.before_gate][-1]


class Window(NamedTuple):
    """Idle time at both ends of a transfer.

    A window begins `delay_s` after my profile's spans[span], which comes after `after` ops. It counts as before the
    gate if it is before the gate of every rank, so its side can differ from that of its span.
    """

    span: int
    after: int
    before_gate: bool
    delay_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The windows of consecutive iterations up to the gate of the last: `T` of Algorithm 2.

    `windows` is the number of windows in a whole iteration.
    """

    T: tuple[float, ...]
    windows: int

    def locate_span(self, index: int) -> tuple[int, int]:
        """Return the iteration (0 is the first) and the window index of the span T[index].

        Raises:
            ValueError: There is no such span.
        """
        if not 0 <= index < len(self.T):
            raise ValueError(f"span {index} is outside 0..{len(self.T) - 1}")
        return divmod(index, self.windows)


def hash_pattern(ops: Iterable[Op]) -> int:
    """Return the 64-bit hash of the sequence of kinds."""
    digest = blake2b(digest_size=8)
    for op in ops:
        digest.update(struct.pack("<Q", op.kind & 0xFFFF_FFFF_FFFF_FFFF))
    return int.from_bytes(digest.digest(), "little")


def find_gaps(trace: Trace) -> list[Gap]:
    """Return the gaps after 0, 1, ... all ops, in order, the gap with the gate as two: len(ops) + 2 in all.

    A gap reaches from the end of all ops before it to the launch of the first op after it, so ops may overlap. An op
    that ends after the iteration keeps the beginning of the next iteration busy. Iterations are alike, so that time
    is subtracted at the start of this iteration.

    Raises:
        ValueError: The gate is outside the iteration, or an op ends before it starts.
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


def summarize_traces(traces: Sequence[Trace], *, floor_s: float = 0.0005, keep: int = 256) -> Profile:
    """Return the profile of iterations of one pattern.

    Spans shorter than `floor_s` seconds are dropped, and all but the `keep` longest of the others. The span that
    ends in the gate stays, even with length 0. A span is planned with the length that all but a tenth of the
    iterations reach; with fewer than 10 iterations, with the shortest.

    Raises:
        ValueError: There is no trace, traces have different patterns, or keep < 1.
    """
    if not traces:
        raise ValueError("no iterations to make a profile of")
    if keep < 1:
        raise ValueError(f"{keep} spans to keep: at least the one before the optimizer's step is needed")
    patterns = {hash_pattern(trace.ops) for trace in traces}
    if len(patterns) > 1:
        raise ValueError(f"{len(traces)} iterations have {len(patterns)} different sequences of collectives")
    iterations = [find_gaps(trace) for trace in traces]
    iteration_s = median(trace.length_s for trace in traces)
    gate_s = median(trace.gate_s for trace in traces)
    # The gate's place among the ops may vary: a part that an iteration lacks has length 0 in it.
    gate_after = median_low([sum(gap.before_gate for gap in gaps) - 1 for gaps in iterations])
    ops = len(traces[0].ops)
    spans: dict[Span, list[float]] = {}
    for before_gate in (True, False):
        sides = [
            _select_side(gaps, before_gate, ops, trace.gate_s) for gaps, trace in zip(iterations, traces, strict=True)
        ]
        for after in range(ops + 1):
            lengths = [side[after].length_s for side in sides]
            start = median(side[after].start_s for side in sides)
            spans[Span(after, before_gate, start, _find_low_length(lengths), fmean(lengths))] = lengths
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
        spans=_cut_overlaps(kept, gate_s, iteration_s),
        idle_s=sum(span.length_s for span in _cut_overlaps(kept, gate_s, iteration_s)),
        dropped_s=max(0.0, fmean(sum(gap.length_s for gap in gaps) for gaps in iterations) - mean_s),
        deviation=sum(pstdev(spans[span]) for span in kept) / mean_s if mean_s > 0 else 0.0,
    )


def add_lag(profile: Profile, lag_s: float) -> Profile:
    """Return the profile of a rank that begins its iterations `lag_s` seconds earlier.

    The rank then waits that much longer before its first collective. While iterations are recorded, all ranks wait
    for each other at the optimizer and go on together. Stages of a pipeline then wait there, where the wait is not
    counted, instead of in the bubble that they would find later.
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


def intersect_profiles(own_profile: Profile, others: Sequence[tuple[Profile, float]]) -> list[Window]:
    """Return the windows of my spans in which all others are idle.

    The windows are in order of time, those before the gate first.

    Each other profile comes with its shift: the start of its iteration minus the start of mine, in seconds by one
    clock. A rank's spans repeat in every iteration of that rank. The gate that counts is the earliest of all ranks,
    because later bytes delay that rank's optimizer. The last window before the gate is always present, possibly with
    length 0: Algorithm 2 treats it as infinite.
    """
    gate = max(0.0, min([own_profile.gate_s, *(shift + other.gate_s for other, shift in others)]))
    free = [(-inf, inf)]
    for other, shift in others:
        free = intersect_intervals(free, _list_idle_times(other, shift, own_profile.iteration_s))
    ends = [end for _, end in free]
    closing = _build_closing_window(own_profile, gate)
    windows: list[Window] = []
    for before_gate in (True, False):
        for index, span in enumerate(own_profile.spans):
            first, last = _cut_span(span, before_gate, gate, own_profile.gate_s)
            overlap = free[bisect_right(ends, first) : bisect_left(ends, last) + 1]
            for start, end in intersect_intervals([(first, last)], overlap):
                # Keep an uncut length as it is: recomputing would round it.
                length = span.length_s if (start, end) == (span.start_s, span.end_s) else end - start
                windows.append(Window(index, span.after, before_gate, start - span.start_s, length))
        if before_gate and (not windows or windows[-1].span != closing.span):
            windows.append(closing)
    return windows


def cap_windows(own_profile: Profile, windows: Sequence[Window], others: Sequence[Profile]) -> list[Window]:
    """Return the same windows, cut to the idle time of the ranks with my pattern.

    These ranks launch the same operations. Their span begins when mine does, whatever any clock shows, because it
    comes after the same operation.
    """
    lengths = [{(span.after, span.before_gate): span.length_s for span in other.spans} for other in others]
    found = []
    for window in windows:
        span = own_profile.spans[window.span]
        room_s = min((known.get((span.after, span.before_gate), 0.0) for known in lengths), default=inf)
        found.append(window._replace(length_s=max(0.0, min(window.length_s, room_s - window.delay_s))))
    return found


def build_timeline(windows: Sequence[Window], s: int) -> Timeline:
    """Return the windows of s iterations up to the gate of the last iteration.

    These are whole iterations, then the part of the last one before the gate.

    Raises:
        ValueError: s < 1, or the windows before the gate do not come first, or there are none.
    """
    if s < 1:
        raise ValueError(f"{s} iterations to spread a checkpoint over: at least 1 is needed")
    before = sum(window.before_gate for window in windows)
    if before == 0 or not all(window.before_gate for window in windows[:before]):
        raise ValueError("an iteration's windows begin with those before the optimizer's step, at least one")
    lengths = tuple(window.length_s for window in windows)
    return Timeline(lengths * (s - 1) + lengths[:before], len(lengths))


def describe_drift(profile: Profile, trace: Trace, tolerance: float = 0.25) -> str:
    """Return why the profile no longer describes the training, as a sentence; '' if it still does.

    Different collectives, or another order, always count. A change of idle time counts in two cases. In the first,
    the changes of all spans, longer and shorter alike, exceed `tolerance` of all idle time. In the second, a span
    with at least that share of all idle time changes by more than `tolerance` of itself. A short span thus counts
    according to its length. One iteration may be an outlier, so check several.
    """
    if len(trace.ops) != profile.ops:
        return f"an iteration launches {len(trace.ops)} collectives, the profile has {profile.ops}"
    if hash_pattern(trace.ops) != profile.pattern:
        return f"an iteration launches {profile.ops} collectives as in the profile, but others or in another order"
    now: dict[tuple[int, bool], float] = {(gap.after, gap.before_gate): gap.length_s for gap in find_gaps(trace)}
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


def _select_side(gaps: list[Gap], before_gate: bool, ops: int, gate: float) -> list[Gap]:
    """Return an iteration's gaps on one side of the gate for every number of ops.

    Gaps of the other side are empty there.
    """
    found = {gap.after: gap for gap in gaps if gap.before_gate == before_gate}
    return [found.get(after, Gap(after, before_gate, gate, 0.0)) for after in range(ops + 1)]


def _find_low_length(lengths: list[float]) -> float:
    return sorted(lengths)[int(len(lengths) * LOW_SHARE)]


def _cut_overlaps(spans: list[Span], gate_s: float, iteration_s: float) -> tuple[Span, ...]:
    """Return the spans cut at the next span, the gate or the iteration's end.

    Each start is a separate median, so spans may overlap before the cut.
    """
    cut = []
    for span, following in zip(spans, [*spans[1:], None], strict=True):
        limit = gate_s if span.before_gate else iteration_s
        if following is not None and following.before_gate == span.before_gate:
            limit = min(limit, following.start_s)
        cut.append(span._replace(length_s=max(0.0, min(span.length_s, limit - span.start_s))))
    return tuple(cut)


def _cut_span(span: Span, before_gate: bool, gate: float, own_gate: float) -> tuple[float, float]:
    """Return the part of my span on one side of the gate that counts, which may be earlier than my own gate.

    The part is empty if its end is not after its start.
    """
    start, end = span.start_s, span.end_s
    if span.before_gate and gate < own_gate:
        return (start, min(end, gate)) if before_gate else (max(start, gate), end)
    return (start, end) if span.before_gate == before_gate else (start, start)


def _build_closing_window(own_profile: Profile, gate: float) -> Window:
    """Return the empty window at the end of my last span that has begun by the gate.

    If no span has begun, the window is before my first span.
    """
    begun = sum(span.before_gate and span.start_s <= gate for span in own_profile.spans)
    index = max(0, begun - 1)
    span = own_profile.spans[index]
    return Window(index, span.after, True, max(0.0, min(span.end_s, gate) - span.start_s), 0.0)


def _list_idle_times(profile: Profile, shift: float, until: float) -> list[tuple[float, float]]:
    """Return the idle times of a rank between 0 and `until`, in seconds.

    The result covers its spans of every iteration, as intervals that do not touch.
    """
    period = profile.iteration_s
    if not period > 0:
        raise ValueError(f"a profile with an iteration of {period} s")
    intervals: list[tuple[float, float]] = []
    begin = shift - (int(shift // period) + 1) * period
    while begin < until:
        intervals += ((begin + span.start_s, begin + span.end_s) for span in profile.spans if span.length_s > 0)
        begin += period
    return merge_ranges(intervals)


def intersect_intervals(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the intersection of two lists of intervals, each in order."""
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
