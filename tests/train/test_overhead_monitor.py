"""When a training has to be profiled again."""

from __future__ import annotations

import pytest

from gemini_hpc.core.save_interval import OverheadController
from gemini_hpc.core.spans import Op, Trace, summarize_traces
from gemini_hpc.train.schedule.overhead_monitor import (
    IN_A_ROW,
    SETTLED,
    WORTH,
    OverheadMonitor,
    Pictured,
)
from gemini_hpc.train.schedule.pacer import Sent

USUAL_S = 1.0
OPS = (Op(1, 8, 0.2, 0.4), Op(2, 8, 0.6, 0.7))


@pytest.fixture
def seen() -> OverheadMonitor:
    profile = summarize_traces([Trace(0.0, USUAL_S, 0.9, OPS)] * 3)
    made = OverheadMonitor(0.01)
    made.adopt_plan(profile, OverheadController(lambda s: 0.0, USUAL_S))
    return made


def iterations(
    seen: OverheadMonitor, length_s: float, waited_s: float, launched: int = len(OPS), most: int = 4 * SETTLED
) -> int:
    """Number of iterations until one is a reason; -1: none is."""
    for number in range(1, most):
        if seen.judge_iteration(length_s, waited_s, launched, 1, saved=True):
            return number
    return -1


def test_as_it_was(seen: OverheadMonitor) -> None:
    assert iterations(seen, USUAL_S, 0.0) == -1
    assert seen.overhead == pytest.approx(0.0)


def test_waits_for_versions_are_a_reason_soon(seen: OverheadMonitor) -> None:
    assert 0 < iterations(seen, 1.1 * USUAL_S, 0.1) < 40


def test_slowness_without_waits_is_no_reason_for_long(seen: OverheadMonitor) -> None:
    assert seen.judged_in == SETTLED, "so `inspect` can say when"
    assert SETTLED <= iterations(seen, 1.02 * USUAL_S, 0.0) < SETTLED + 40
    assert seen.overhead == pytest.approx(0.02) and seen.judged_in == 0


def test_but_as_soon_as_it_has_lost_what_a_profile_costs(seen: OverheadMonitor) -> None:
    """And then it is believed once; what it was that lost it, the next profile shows."""
    first = iterations(seen, 1.1 * USUAL_S, 0.0)
    assert WORTH <= 0.09 * first < WORTH + 0.09
    seen.adopt_plan(summarize_traces([Trace(0.0, USUAL_S, 0.9, OPS)] * 3), OverheadController(lambda s: 0.0, USUAL_S))
    second = iterations(seen, 1.1 * USUAL_S, 0.0)
    assert 2 * WORTH <= 0.09 * second < 2 * WORTH + 0.09


def test_but_not_where_j_is_forced(seen: OverheadMonitor) -> None:
    """Nothing would change but that there is one profile more."""
    seen.adopt_plan(
        summarize_traces([Trace(0.0, USUAL_S, 0.9, OPS)] * 3), OverheadController(lambda s: 0.0, USUAL_S, forced=1)
    )
    assert SETTLED <= iterations(seen, 1.1 * USUAL_S, 0.0) < SETTLED + 40


def test_one_long_iteration_has_lost_nothing(seen: OverheadMonitor) -> None:
    """An evaluation, a checkpoint of the user's own."""
    for number in range(SETTLED - 1):
        assert not seen.judge_iteration((50.0 if number % 9 == 5 else 1.0) * USUAL_S, 0.0, len(OPS), 1, saved=True)


def test_a_profile_of_slow_seconds_is_made_anew(seen: OverheadMonitor) -> None:
    """Waits of the training hide in iterations that are shorter than they were thought to be, and none is seen."""
    assert SETTLED <= iterations(seen, 0.9 * USUAL_S, 0.0) < SETTLED + 40
    assert seen.overhead == pytest.approx(-0.1)


def test_where_profiling_makes_iterations_longer_it_is_tried_ever_less_often(seen: OverheadMonitor) -> None:
    ages = []
    for _ in range(4):
        ages.append(iterations(seen, 0.9 * USUAL_S, 0.0, most=20 * SETTLED))
        seen.adopt_plan(summarize_traces([Trace(0.0, USUAL_S, 0.9, OPS)] * 3), seen._controller)
    assert all(2**k * SETTLED <= age < 2**k * SETTLED + 40 for k, age in enumerate(ages))


def test_another_frequency_does_not_turn_little_into_much(seen: OverheadMonitor) -> None:
    """Iterations of 2 % less are 20 % of one in a cycle of ten."""
    for number in range(2 * SETTLED):
        assert not seen.judge_iteration(0.98 * USUAL_S, 0.0, len(OPS), 10, saved=number % 10 == 9)
    for number in range(2 * SETTLED):
        assert not seen.judge_iteration(0.98 * USUAL_S, 0.0, len(OPS), 3, saved=number % 3 == 2)


def test_a_profile_of_slow_seconds_is_noticed_where_only_most_iterations_are_shorter(seen: OverheadMonitor) -> None:
    for number in range(4 * SETTLED):
        why = seen.judge_iteration((3.0 if number % 5 == 0 else 0.9) * USUAL_S, 0.0, len(OPS), 1, saved=True)
        if why:
            break
    assert "less than in the profile" in why
    assert number + 1 >= SETTLED


def test_iterations_that_are_a_little_shorter_are_no_reason(seen: OverheadMonitor) -> None:
    assert iterations(seen, 0.96 * USUAL_S, 0.0) == -1


def test_shorter_ones_that_wait_for_versions_are_no_reason_before_they_have_settled(seen: OverheadMonitor) -> None:
    assert iterations(seen, 0.9 * USUAL_S, 0.1) >= SETTLED


def test_other_collectives(seen: OverheadMonitor) -> None:
    assert iterations(seen, USUAL_S, 0.0, len(OPS) + 1) == IN_A_ROW


def test_chunks_that_are_on_their_way_together_count_once() -> None:
    at = 100.0
    times = [(-0.3, -0.1), (-0.1, 0.1), (0.0, 0.1), (0.05, 0.15), (0.15, 0.25), (0.65, 0.8), (0.95, 1.2), (1.1, 1.2)]
    chunks = tuple(Sent(1, 0, 1, at + sent, at + acked, False) for sent, acked in times)
    number, busy_s, beside_s = Pictured(1, Trace(at, USUAL_S, 0.9, OPS), chunks, (), 0.0).measure_overlap()
    assert number == 6
    assert busy_s == pytest.approx(0.25 + 0.15 + 0.05)
    assert beside_s == pytest.approx(0.05 + 0.05)
