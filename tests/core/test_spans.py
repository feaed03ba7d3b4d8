from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core.ranges import merge_ranges
from gemini_hpc.core.spans import (
    Gap,
    Op,
    Profile,
    Span,
    Timeline,
    Trace,
    Window,
    add_lag,
    build_timeline,
    cap_windows,
    describe_drift,
    find_gaps,
    hash_pattern,
    intersect_intervals,
    intersect_profiles,
    summarize_traces,
)

UNIT = 1 / 1024  # times are multiples of it, so that they add up exactly


@st.composite
def traces(draw: st.DrawFn, *, most_ops: int = 8, tail: int = 200) -> Trace:
    length = draw(st.integers(1, 2000))
    starts = sorted(draw(st.lists(st.integers(0, length), max_size=most_ops)))
    ops = tuple(
        Op(draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**30)), start * UNIT, end * UNIT)
        for start in starts
        for end in [draw(st.integers(start, length + tail))]
    )
    return Trace(draw(st.floats(0, 1e9)), length * UNIT, draw(st.integers(0, length)) * UNIT, ops)


def stretched(trace: Trace, factor: float) -> Trace:
    ops = tuple(op._replace(start_s=op.start_s * factor, end_s=op.end_s * factor) for op in trace.ops)
    return replace(trace, length_s=trace.length_s * factor, gate_s=trace.gate_s * factor, ops=ops)


def steady(idle_s: list[float], busy_s: list[float], gate_after: int) -> Trace:
    """Idle and busy times by turns; the gate is in the middle of the idle time after `gate_after` collectives."""
    now = gate = 0.0
    ops = []
    for k, length in enumerate(idle_s):
        if k == gate_after:
            gate = now + length / 2
        now += length
        if k < len(busy_s):
            ops.append(Op(k, 1 << 20, now, now + busy_s[k]))
            now += busy_s[k]
    return Trace(0.0, now, gate, tuple(ops))


class TestIdle:
    @given(traces())
    def test_a_moment_is_in_a_gap_if_and_only_if_nothing_runs(self, trace: Trace) -> None:
        gaps = find_gaps(trace)
        carried = max([0.0, *(op.end_s - trace.length_s for op in trace.ops)])
        for tick in range(round(trace.length_s / UNIT)):
            now = (tick + 0.5) * UNIT
            running = now < carried or any(op.start_s <= now < op.end_s for op in trace.ops)
            around = [gap for gap in gaps if gap.start_s <= now < gap.start_s + gap.length_s]
            assert len(around) == (not running)
            for gap in around:
                assert gap.before_gate == (now < trace.gate_s)
                assert gap.after == sum(op.start_s <= now for op in trace.ops)

    @given(traces())
    def test_there_is_one_for_each_number_of_ops_and_two_at_the_gate(self, trace: Trace) -> None:
        gaps = find_gaps(trace)
        before = [gap.after for gap in gaps if gap.before_gate]
        after = [gap.after for gap in gaps if not gap.before_gate]
        assert before == list(range(before[-1] + 1))
        assert after == list(range(before[-1], len(trace.ops) + 1))
        assert before[-1] == sum(op.start_s < trace.gate_s for op in trace.ops)
        assert [gap.before_gate for gap in gaps] == [True] * len(before) + [False] * len(after)
        assert all(a.start_s + a.length_s <= b.start_s for a, b in pairwise(gaps) if a.length_s > 0)
        assert all(a.start_s <= b.start_s for a, b in pairwise(gaps))

    def test_an_example_by_hand(self) -> None:
        ops = (Op(1, 8, 1.0, 4.0), Op(2, 8, 2.0, 3.0), Op(3, 8, 6.0, 11.0))
        assert find_gaps(Trace(0.0, 10.0, 5.0, ops)) == [
            Gap(0, True, 1.0, 0.0),  # the third op reaches one second into the next iteration
            Gap(1, True, 4.0, 0.0),
            Gap(2, True, 4.0, 1.0),
            Gap(2, False, 5.0, 1.0),
            Gap(3, False, 10.0, 0.0),
        ]

    def test_an_op_that_starts_out_of_order_is_idle_time_of_nobody(self) -> None:
        gaps = find_gaps(Trace(0.0, 10.0, 9.0, (Op(1, 8, 5.0, 6.0), Op(2, 8, 1.0, 2.0))))
        assert [(gap.after, gap.start_s, gap.length_s) for gap in gaps if gap.length_s > 0] == [
            (0, 0.0, 1.0),
            (2, 6.0, 3.0),
            (2, 9.0, 1.0),
        ]

    def test_the_impossible_is_told(self) -> None:
        for gate, op in (
            (11.0, Op(1, 1, 0, 1)),
            (-1.0, Op(1, 1, 0, 1)),
            (5.0, Op(1, 1, 3, 2)),
            (5.0, Op(1, 1, -1, 2)),
        ):
            assert re.search(
                r"optimizer's step at|a collective from",
                refusal(ValueError, find_gaps, Trace(0.0, 10.0, gate, (op,))),
            ), (gate, op)


class TestSummarize:
    @given(traces(), st.integers(1, 25))
    def test_equal_iterations_are_their_own_profile(self, trace: Trace, times: int) -> None:
        profile = summarize_traces([trace] * times, floor_s=0.0)
        gate_after = [gap for gap in find_gaps(trace) if gap.before_gate][-1].after
        expected = [
            gap for gap in find_gaps(trace) if gap.length_s > 0 or (gap.before_gate and gap.after == gate_after)
        ]
        assert [(span.after, span.before_gate) for span in profile.spans] == [gap[:2] for gap in expected]
        for span, gap in zip(profile.spans, expected, strict=True):
            assert (span.start_s, span.length_s) == (gap.start_s, gap.length_s)
            assert span.mean_s == pytest.approx(gap.length_s)
        assert (profile.ops, profile.iterations) == (len(trace.ops), times)
        assert (profile.iteration_s, profile.gate_s) == (trace.length_s, trace.gate_s)
        assert profile.idle_s == pytest.approx(sum(gap.length_s for gap in find_gaps(trace)))
        assert profile.dropped_s == pytest.approx(0, abs=1e-9)
        assert profile.deviation == pytest.approx(0, abs=1e-9)

    @given(traces(), st.lists(st.floats(0.5, 2), min_size=1, max_size=25), st.floats(0, 0.5), st.integers(1, 5))
    def test_spans_keep_apart_and_to_their_side(
        self, trace: Trace, factors: list[float], floor_s: float, keep: int
    ) -> None:
        some = [stretched(trace, factor) for factor in factors]
        profile = summarize_traces(some, floor_s=floor_s, keep=keep)
        spans = profile.spans
        tiny = 1e-9
        assert all(a.end_s <= b.start_s + tiny for a, b in pairwise(spans))
        assert sorted(spans, key=lambda span: not span.before_gate) == list(spans)
        assert all(span.end_s <= profile.gate_s + tiny for span in spans if span.before_gate)
        assert all(profile.gate_s <= span.start_s + tiny for span in spans if not span.before_gate)
        assert all(0 <= span.start_s <= span.end_s <= profile.iteration_s + tiny for span in spans)
        assert 1 <= len(spans) <= keep
        gate_after = sum(op.start_s < trace.gate_s for op in trace.ops)
        assert profile.gate_span.after == gate_after
        others = [span for span in spans if span != profile.gate_span]
        assert all(span.mean_s >= floor_s - tiny for span in others)
        lengths = {
            (gap.after, gap.before_gate): sorted(gap.length_s * factor for factor in factors)
            for gap in find_gaps(trace)
        }
        kept = {(span.after, span.before_gate) for span in spans}
        for span in spans:
            own = lengths[span.after, span.before_gate]
            assert own[0] - tiny <= span.mean_s <= own[-1] + tiny
            assert span.length_s <= own[len(own) // 10] + tiny
        # None that was left out is longer than one that was kept.
        left_out = [own[len(own) // 10] for name, own in lengths.items() if name not in kept]
        if len(spans) == keep:
            assert all(longest <= span.length_s + 1 for longest in left_out for span in others)
        else:
            assert all(longest <= floor_s + tiny for longest in left_out)

    @given(
        st.integers(2, 5).flatmap(
            lambda n: st.lists(
                st.lists(st.sampled_from([0.0, 3.0, 10.0]), min_size=n, max_size=n), min_size=10, max_size=12
            )
        )
    )
    @example([[0.0, 3.0, 20.0]] * 5 + [[10.0, 3.0, 20.0]] * 4 + [[10.0, 0.0, 20.0]])
    @example([[0.0, 3.0]] * 5 + [[10.0, 3.0]] * 4 + [[10.0, 0.0]])
    def test_spans_keep_apart_where_each_varies_by_itself(self, lengths: list[list[float]]) -> None:
        profile = summarize_traces(
            [steady(one, [0.0] * (len(one) - 1), len(one) // 2) for one in lengths], floor_s=0.0
        )
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(profile.spans))
        assert profile.gate_span.end_s <= profile.gate_s + 1e-9
        assert profile.spans[-1].end_s <= profile.iteration_s + 1e-9
        assert all(span.length_s >= 0 for span in profile.spans)
        assert profile.idle_s == pytest.approx(sum(span.length_s for span in profile.spans))

    @given(st.integers(10, 40), st.data())
    def test_a_tenth_of_outliers_moves_no_plan(self, n: int, data: st.DataObject) -> None:
        """A span that is nearly always 2 s long is planned as 2 s, whatever a few iterations did."""
        odd = data.draw(st.lists(st.floats(0, 50), max_size=n // 10))
        lengths = [*odd, *[2.0] * (n - len(odd))]
        profile = summarize_traces([steady([length, 1.0], [1.0], 1) for length in lengths])
        assert profile.spans[0].length_s == pytest.approx(2.0)
        assert profile.spans[0].mean_s == pytest.approx(sum(lengths) / n)

    def test_of_a_few_iterations_the_shortest_counts(self) -> None:
        profile = summarize_traces([steady([length, 1.0], [1.0], 1) for length in (3.0, 2.0, 4.0)])
        assert profile.spans[0].length_s == pytest.approx(2.0)

    def test_the_longest_are_kept_and_the_rest_is_known(self) -> None:
        trace = steady([0.3, 0.1, 0.4, 0.002, 0.2], [0.1] * 4, 3)
        profile = summarize_traces([trace], floor_s=0.05, keep=3)
        assert [(span.after, span.before_gate) for span in profile.spans] == [(0, True), (2, True), (3, True)]
        assert profile.dropped_s == pytest.approx(0.1 + 0.001 + 0.2)
        assert profile.idle_s == pytest.approx(0.3 + 0.4 + 0.001)

    def test_deviation_is_weighted_by_length(self) -> None:
        """Lengths of 1 and 3 deviate by 1 around 2, those of 18 not at all: 1 in 20 of the idle time."""
        profile = summarize_traces([steady([length, 36.0], [1.0], 1) for length in (1.0, 3.0)])
        assert profile.deviation == pytest.approx(1 / (2 + 18 + 18))

    def test_a_gate_that_moves_past_a_collective_is_planned_cautiously(self) -> None:
        early = Trace(0.0, 10.0, 4.0, (Op(1, 8, 5.0, 6.0),))
        late = replace(early, gate_s=7.0)
        profile = summarize_traces([early, late])
        assert profile.gate_span.after == 0
        assert [(span.after, span.before_gate, span.length_s) for span in profile.spans] == [
            (0, True, 4.0),
            (1, False, 3.0),
        ]

    def test_patterns_are_not_mixed(self) -> None:
        a, b = Op(1, 8, 1.0, 2.0), Op(2, 8, 1.0, 2.0)
        with pytest.raises(ValueError, match="2 iterations have 2 different"):
            summarize_traces([Trace(0.0, 10.0, 5.0, (a,)), Trace(0.0, 10.0, 5.0, (b,))])
        with pytest.raises(ValueError, match="no iterations"):
            summarize_traces([])
        with pytest.raises(ValueError, match="0 spans to keep"):
            summarize_traces([Trace(0.0, 10.0, 5.0, ())], keep=0)

    def test_a_pattern_is_the_same_in_every_process(self) -> None:
        ops = [Op(kind, 1, 0.0, 1.0) for kind in (1, 2**64 - 1, -1, 7)]
        code = (
            "from gemini_hpc.core.spans import Op, hash_pattern;"
            "print(hash_pattern([Op(kind, 9, 3.0, 4.0) for kind in (1, 2**64 - 1, -1, 7)]))"
        )
        found = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert hash_pattern(ops) == int(found) < 2**64
        assert hash_pattern(ops) != hash_pattern(ops[::-1])
        assert hash_pattern(ops) != hash_pattern(ops[:-1])

    def test_a_profile_of_a_large_training_fits_32_kb(self) -> None:
        generator = random.Random(1)
        lengths = [generator.uniform(0.001, 0.01) for _ in range(3001)]
        profile = summarize_traces([steady(lengths, [0.001] * 3000, 2900)] * 3)
        encoded = msgspec.msgpack.encode(profile)
        assert len(profile.spans) == 256
        assert len(encoded) < 32 << 10
        assert msgspec.msgpack.decode(encoded, type=Profile) == profile


def whole(profile: Profile) -> list[Window]:
    return [
        Window(index, span.after, span.before_gate, 0.0, span.length_s) for index, span in enumerate(profile.spans)
    ]


def idle_at(profile: Profile, now: float) -> bool:
    now %= profile.iteration_s
    return any(span.start_s < now < span.end_s for span in profile.spans)


class TestWaiting:
    @given(traces(), st.integers(0, 3000))
    def test_it_is_idle_at_first_and_then_as_before(self, trace: Trace, ticks: int) -> None:
        profile, lag_s = summarize_traces([trace], floor_s=0.0), ticks * UNIT
        later = add_lag(profile, lag_s)
        assert (later.pattern, later.ops) == (profile.pattern, profile.ops)
        assert later.iteration_s == profile.iteration_s + lag_s
        assert later.gate_s == profile.gate_s + lag_s
        assert later.idle_s == pytest.approx(profile.idle_s + lag_s)
        assert sum(span.length_s for span in later.spans) == pytest.approx(later.idle_s)
        carried = next((s.start_s for s in profile.spans if not s.after and s.before_gate), 0.0)
        for tick in range(round(later.iteration_s / UNIT)):
            now = (tick + 0.5) * UNIT
            if carried < now < carried + lag_s:
                assert idle_at(later, now)
            elif now > carried + lag_s:
                assert idle_at(later, now) == idle_at(profile, now - lag_s)

    def test_a_stage_that_waits_for_the_first_has_room_in_its_bubble(self) -> None:
        first = summarize_traces([steady([3.0, 3.0], [1.0], 1)])
        second = summarize_traces([replace(steady([1.0, 3.0], [1.0], 1), gate_s=2.5)])
        second = add_lag(second, first.iteration_s - second.iteration_s)
        windows = intersect_profiles(second, [(first, 2.0)])
        assert sum(w.length_s for w in windows if w.before_gate) > 2.0


class TestIntersect:
    @given(traces(), st.lists(st.floats(0.5, 2), min_size=1, max_size=12), st.integers(0, 3))
    def test_equal_ranks_have_all_their_spans(self, trace: Trace, factors: list[float], ranks: int) -> None:
        mine = summarize_traces([stretched(trace, factor) for factor in factors])
        assert intersect_profiles(mine, [(mine, 0.0)] * ranks) == whole(mine)

    @given(traces(), st.lists(st.tuples(traces(), st.integers(-3000, 3000)), max_size=3), st.booleans(), st.randoms())
    def test_windows_are_where_all_are_idle(
        self, trace: Trace, drawn: list[tuple[Trace, int]], in_step: bool, generator: random.Random
    ) -> None:
        mine = summarize_traces([trace], floor_s=0.0)
        others = [(summarize_traces([other], floor_s=0.0), shift * UNIT) for other, shift in drawn]
        if in_step:
            period = max([trace.length_s, *(other.length_s for other, _ in drawn)])
            mine = replace(mine, iteration_s=period)
            others = [(replace(other, iteration_s=period), shift) for other, shift in others]
        gate = max(0.0, min([mine.gate_s, *(shift + other.gate_s for other, shift in others)]))
        windows = intersect_profiles(mine, others)
        placed = [
            (start, start + window.length_s, window)
            for window in windows
            for start in [mine.spans[window.span].start_s + window.delay_s]
        ]
        assert all(window.after == mine.spans[window.span].after for window in windows)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(placed))
        for _ in range(50):
            # All edges are multiples of UNIT: no moment is near one.
            now = (generator.randrange(round(mine.iteration_s / UNIT)) + 0.5) * UNIT
            together = idle_at(mine, now) and all(idle_at(other, now - shift) for other, shift in others)
            around = [window for start, end, window in placed if start < now < end]
            assert len(around) == together
            for window in around:
                assert window.before_gate == (now < gate)

    @given(traces(), traces(), st.floats(-3, 3))
    def test_the_window_at_the_gate_is_always_there(self, trace: Trace, other: Trace, shift: float) -> None:
        mine, theirs = summarize_traces([trace]), summarize_traces([other])
        windows = intersect_profiles(mine, [(theirs, shift)])
        before = [window for window in windows if window.before_gate]
        assert before
        assert windows[: len(before)] == before
        assert all(window.length_s > 0 for window in windows if window != before[-1])
        assert all(window.delay_s >= 0 and window.length_s >= 0 for window in windows)
        if shift + theirs.gate_s >= mine.gate_s:
            assert mine.spans[before[-1].span] == mine.gate_span

    def test_an_example_by_hand(self) -> None:
        """Mine: idle 0..2, 4..6 (gate at 5), 8..10. The other one is half a second later, its gate at 5.5."""
        mine = summarize_traces([steady([2.0, 2.0, 2.0], [2.0, 2.0], 1)])
        assert intersect_profiles(mine, [(mine, 0.5)]) == [
            Window(0, 0, True, 0.0, 2.0),  # also in the end of the other's iteration before: 8.5 to 10.5
            Window(1, 1, True, 0.5, 0.5),
            Window(2, 1, False, 0.0, 1.0),
            Window(3, 2, False, 0.5, 1.5),
        ]
        # Half a second earlier, its gate is at 4.5 by my clock: what is sent later holds it up.
        assert intersect_profiles(mine, [(mine, -0.5)]) == [
            Window(0, 0, True, 0.0, 1.5),
            Window(1, 1, True, 0.0, 0.5),
            Window(1, 1, False, 0.5, 0.5),
            Window(2, 1, False, 0.0, 0.5),
            Window(3, 2, False, 0.0, 2.0),
        ]

    def test_one_that_is_never_idle_leaves_the_window_at_the_gate(self) -> None:
        mine = summarize_traces([steady([2.0, 2.0, 2.0], [2.0, 2.0], 1)])
        busy = summarize_traces([Trace(0.0, 10.0, 10.0, (Op(1, 8, 0.0, 10.0),))])
        assert intersect_profiles(mine, [(busy, 0.0)]) == [Window(1, 1, True, 1.0, 0.0)]

    def test_one_whose_gate_comes_before_my_first_span(self) -> None:
        mine = summarize_traces([Trace(0.0, 10.0, 10.0, (Op(1, 8, 0.0, 5.0),))])
        early = summarize_traces([Trace(0.0, 10.0, 1.0, ())])
        assert intersect_profiles(mine, [(early, 0.0)]) == [
            Window(0, 1, True, 0.0, 0.0),
            Window(0, 1, False, 0.0, 5.0),
        ]


class TestCapped:
    @given(traces(), st.lists(st.floats(0.5, 2), max_size=3))
    def test_spans_are_told_by_their_operations_and_not_by_clocks(self, trace: Trace, factors: list[float]) -> None:
        """Another rank's iteration of the same pattern may be anywhere in time."""
        mine = summarize_traces([trace], floor_s=0.0)
        others = [summarize_traces([stretched(trace, factor)], floor_s=0.0) for factor in factors]
        windows = cap_windows(mine, whole(mine), others)
        least = min([1.0, *factors])
        assert [w._replace(length_s=0.0) for w in windows] == [w._replace(length_s=0.0) for w in whole(mine)]
        for window, span in zip(windows, mine.spans, strict=True):
            assert window.length_s == pytest.approx(span.length_s * least)

    def test_an_example_by_hand(self) -> None:
        mine = summarize_traces([steady([2.0, 2.0, 2.0], [2.0, 2.0], 1)])
        later = summarize_traces([steady([3.0, 1.0, 2.5], [2.0, 2.0], 1)])
        assert [w.length_s for w in cap_windows(mine, whole(mine), [later])] == [2.0, 0.5, 0.5, 2.0]
        cut = [window._replace(delay_s=0.25, length_s=window.length_s - 0.25) for window in whole(mine)]
        assert [w.length_s for w in cap_windows(mine, cut, [later])] == [1.75, 0.25, 0.25, 1.75]

    def test_a_span_that_the_other_has_not_kept(self) -> None:
        mine = summarize_traces([steady([2.0, 2.0, 2.0], [2.0, 2.0], 1)])
        fewer = summarize_traces([steady([2.0, 2.0, 0.001], [2.0, 2.0], 1)], floor_s=0.01)
        assert [w.length_s for w in cap_windows(mine, whole(mine), [fewer])] == [2.0, 1.0, 1.0, 0.0]


class TestTimeline:
    @given(traces(), st.integers(1, 6))
    def test_whole_iterations_then_the_part_before_the_gate(self, trace: Trace, s: int) -> None:
        windows = intersect_profiles(summarize_traces([trace]), [])
        before = [window for window in windows if window.before_gate]
        line = build_timeline(windows, s)
        walked = [line.locate_span(index) for index in range(len(line.T))]
        assert walked == [
            (iteration, window)
            for iteration in range(s)
            for window in range(len(windows) if iteration < s - 1 else len(before))
        ]
        assert tuple(windows[window].length_s for _, window in walked) == line.T
        for index in (-1, len(line.T)):
            with pytest.raises(ValueError, match="outside 0"):
                line.locate_span(index)

    def test_what_is_no_iteration_is_told(self) -> None:
        before, after = Window(0, 0, True, 0.0, 1.0), Window(1, 0, False, 0.0, 1.0)
        assert build_timeline([before, after], 2) == Timeline((1.0, 1.0, 1.0), 2)
        with pytest.raises(ValueError, match="0 iterations"):
            build_timeline([before], 0)
        for wrong in ([], [after], [after, before], [before, after, before]):
            with pytest.raises(ValueError, match="begin with those before"):
                build_timeline(wrong, 1)


idle_lengths = st.lists(st.floats(0.05, 1), min_size=2, max_size=12)


class TestDrifted:
    @given(idle_lengths, st.data())
    def test_noise_below_the_tolerance_is_no_drift(self, lengths: list[float], data: st.DataObject) -> None:
        gate = data.draw(st.integers(0, len(lengths) - 1))
        busy = [0.1] * (len(lengths) - 1)
        profile = summarize_traces([steady(lengths, busy, gate)] * 3)
        noise = [length * data.draw(st.floats(0.78, 1.22)) for length in lengths]
        assert describe_drift(profile, steady(noise, busy, gate)) == ""

    @given(traces())
    def test_an_iteration_of_the_profile_is_no_drift(self, trace: Trace) -> None:
        assert describe_drift(summarize_traces([trace] * 4), trace) == ""

    @given(idle_lengths, st.one_of(st.floats(0, 0.7), st.floats(1.3, 5)), st.data())
    def test_other_idle_time_is_drift(self, lengths: list[float], factor: float, data: st.DataObject) -> None:
        gate = data.draw(st.integers(0, len(lengths) - 1))
        busy = [0.1] * (len(lengths) - 1)
        profile = summarize_traces([steady(lengths, busy, gate)] * 3)
        now = steady([length * factor for length in lengths], busy, gate)
        assert "have changed by" in describe_drift(profile, now)
        assert describe_drift(profile, now, tolerance=abs(factor - 1) + 0.01) == ""

    @given(st.permutations([1.0, 0.8, 0.5, 0.2, 0.1, 0.05]), st.data())
    def test_the_same_sum_elsewhere_is_drift(self, lengths: list[float], data: st.DataObject) -> None:
        moved = data.draw(st.permutations(lengths))
        changed = sum(abs(a - b) for a, b in zip(lengths, moved, strict=True))
        assume(abs(changed - 0.25 * sum(lengths)) > 1e-6)
        profile = summarize_traces([steady(lengths, [0.1] * 6, 6)] * 3)
        found = describe_drift(profile, steady(moved, [0.1] * 6, 6))
        if changed > 0.25 * sum(lengths):
            assert "idle spans of an iteration have changed" in found
        else:
            assert "in all" not in found

    def test_a_short_span_counts_for_what_it_is(self) -> None:
        profile = summarize_traces([steady([2.0, 0.02, 1.0, 0.0], [0.1] * 3, 3)] * 3)
        assert describe_drift(profile, steady([2.0, 0.4, 1.0, 0.0], [0.1] * 3, 3)) == ""
        assert describe_drift(profile, steady([2.0, 0.0, 1.0, 0.0], [0.1] * 3, 3)) == ""
        assert "span after 2 collectives has changed from 1 s to 0.7 s" in describe_drift(
            profile, steady([2.0, 0.02, 0.7, 0.0], [0.1] * 3, 3)
        )

    def test_spans_that_were_dropped_count_when_they_grow(self) -> None:
        profile = summarize_traces([steady([0.0001, 0.5, 0.0], [0.1] * 2, 2)] * 3)
        assert [span.after for span in profile.spans] == [1, 2]
        assert "from 0.5 s to 0.9 s together" in describe_drift(profile, steady([0.4, 0.5, 0.0], [0.1] * 2, 2))

    def test_where_there_is_hardly_any_idle_time_its_noise_is_no_drift(self) -> None:
        profile = summarize_traces([steady([0.001, 0.0], [1.0], 1)] * 3)
        assert describe_drift(profile, steady([0.003, 0.0], [1.0], 1)) == ""
        assert describe_drift(profile, steady([0.1, 0.0], [1.0], 1)) != ""

    def test_other_collectives_are_drift(self) -> None:
        trace = steady([1.0, 1.0, 1.0], [0.1, 0.1], 1)
        profile = summarize_traces([trace])
        assert "launches 1 collectives, the profile has 2" in describe_drift(
            profile, replace(trace, ops=trace.ops[:1])
        )
        swapped = tuple(op._replace(kind=5) for op in trace.ops)
        assert "in another order" in describe_drift(profile, replace(trace, ops=swapped))


def test_a_span_is_planned_and_compared() -> None:
    assert Span(0, True, 1.0, 2.0, 3.0).end_s == 3.0


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda t: (float(t[0]), float(sum(t)))))


@given(a=INTERVALS, b=INTERVALS)
def test_joined_intervals_and_what_two_have_in_common(
    a: list[tuple[float, float]], b: list[tuple[float, float]]
) -> None:
    def units(intervals: list[tuple[float, float]]) -> set[float]:
        return {start + k for start, end in intervals for k in range(int(end - start))}

    one, other = merge_ranges(a), merge_ranges(b)
    assert all(before[1] < after[0] for before, after in pairwise(one))
    assert units(one) == units(a)
    assert units(intersect_intervals(one, other)) == units(a) & units(b)
