from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core import schedule
from gemini_hpc.core.save_interval import LARGEST_J, Frequency, Need, OverheadController, choose_frequency
from gemini_hpc.core.spans import Window, build_timeline


@dataclass(frozen=True)
class Linear:
    """send_s to send, before_s of it fits before the gate, idle_s into a whole iteration; fixed_s never fits."""

    send_s: float
    before_s: float
    idle_s: float
    fixed_s: float = 0.0

    def __call__(self, s: int) -> float:
        return max(0.0, self.send_s - self.before_s - (s - 1) * self.idle_s) + self.fixed_s

    def signed(self, s: int) -> float:
        return self.send_s - self.before_s - (s - 1) * self.idle_s


@st.composite
def linear(draw: st.DrawFn, *, fixed: st.SearchStrategy[float] | None = None) -> Linear:
    idle_s = draw(st.floats(0, 2))
    fixed_s = 0.0 if fixed is None else draw(fixed)
    return Linear(draw(st.floats(0, 30)), idle_s * draw(st.floats(0, 1)), idle_s, fixed_s)


def by_trying_all(
    need: Callable[[int], float], iteration_s: float, ceiling: float, spread: bool, largest: int
) -> tuple[int, int] | None:
    for j in range(1, largest + 1):
        for s in range(1, (j if spread else 1) + 1):
            if max(0.0, need(s)) / (j * iteration_s) <= ceiling:
                return j, s
    return None


def repeated_by_walking(j: int, s: int) -> int:
    """The most completed steps that a failure repeats, over every moment of a long training."""
    worst = 0
    for done in range(4 * j, 8 * j + s):
        saved = [v for v in range(0, done + 1, j) if v + s <= done]  # v was sealed before the step to v + s
        worst = max(worst, done - max(saved))
    return worst


@given(linear(), st.floats(0.1, 5), st.floats(0.005, 0.5), st.booleans(), st.integers(1, 120))
@example(Linear(0.125, 0.0, 4.458867742664995e-19), 0.125, 0.03125, True, 27)
def test_it_is_the_smallest_of_all(
    need: Linear, iteration_s: float, ceiling: float, spread: bool, largest: int
) -> None:
    found = choose_frequency(need, iteration_s, ceiling=ceiling, spread=spread, largest=largest)
    expected = by_trying_all(need, iteration_s, ceiling, spread, largest)
    assert found.within == (expected is not None)
    assert found.overhead == max(0.0, need(found.s)) / (found.j * iteration_s)
    assert found.repeated == found.j + found.s - 1
    if expected is not None:
        assert (found.j, found.s) == expected
    else:
        assert found.j == largest
        widest = largest if spread else 1
        # Needs may differ by less than the division leaves.
        cost = {s: max(0.0, need(s)) / (largest * iteration_s) for s in range(1, widest + 1)}
        assert found.s == min(s for s in cost if cost[s] == cost[widest])


@given(st.integers(1, 12), st.data())
def test_the_worst_case_is_what_happens(j: int, data: st.DataObject) -> None:
    s = data.draw(st.integers(1, j))
    assert repeated_by_walking(j, s) == j + s - 1


@given(linear(), st.floats(0.1, 5), st.integers(1, 60), st.booleans())
@example(need=Linear(send_s=12.0, before_s=0.0, idle_s=2.0**-52), iteration_s=1.25, j=16, spread=True)
def test_a_forced_j_is_kept(need: Linear, iteration_s: float, j: int, spread: bool) -> None:
    found = choose_frequency(need, iteration_s, forced=j, spread=spread)
    assert found.j == j
    # Needs may differ by less than the division leaves.
    cost = {s: max(0.0, need(s)) / (j * iteration_s) for s in range(1, (j if spread else 1) + 1)}
    good = [s for s in cost if cost[s] <= 0.01]
    assert found.within == bool(good)
    # Too slow even so: what costs least, as training goes first.
    assert found.s == (good or [s for s in cost if cost[s] == min(cost.values())])[0]


def test_examples_by_hand() -> None:
    fits = Linear(send_s=1.0, before_s=1.0, idle_s=2.0)
    assert choose_frequency(fits, 5.0) == Frequency(j=1, s=1, overhead=0.0, repeated=1, within=True)
    # 3 s to send, 1 s before the gate, 2 s an iteration: two iterations take it all.
    spreads = Linear(send_s=3.0, before_s=1.0, idle_s=2.0)
    assert choose_frequency(spreads, 5.0) == Frequency(j=2, s=2, overhead=0.0, repeated=3, within=True)
    assert choose_frequency(spreads, 5.0, spread=False) == Frequency(
        j=40, s=1, overhead=0.01, repeated=40, within=True
    )
    assert choose_frequency(spreads, 5.0, ceiling=0.5) == Frequency(j=1, s=1, overhead=0.4, repeated=1, within=True)


def test_the_capture_costs_the_same_whatever_s_is() -> None:
    fits = Linear(send_s=1.0, before_s=1.0, idle_s=2.0)
    assert choose_frequency(fits, 5.0, own_s=0.2) == Frequency(j=4, s=1, overhead=0.01, repeated=4, within=True)
    spreads = Linear(send_s=3.0, before_s=1.0, idle_s=2.0)
    assert choose_frequency(spreads, 5.0, own_s=0.2) == Frequency(j=4, s=2, overhead=0.01, repeated=5, within=True)
    assert not choose_frequency(fits, 5.0, own_s=0.2, forced=1).within


def test_a_very_slow_link_is_told_at_once() -> None:
    asked = []

    def hopeless(s: int) -> float:
        asked.append(s)
        return 1e9

    found = choose_frequency(hopeless, 1.0)
    assert found == Frequency(LARGEST_J, 1, 1e9 / LARGEST_J, LARGEST_J, within=False)
    assert len(asked) < 80
    barely = Linear(send_s=9_000.0, before_s=0.0, idle_s=0.9)
    start = time.perf_counter()
    found = choose_frequency(barely, 1.0)
    assert time.perf_counter() - start < 0.2
    assert found.within
    assert 9_000 < found.j + 90 < 10_100


def test_the_impossible_is_told() -> None:
    for iteration_s, ceiling, forced, largest, sentence in (
        (0.0, 0.01, None, 10, "an iteration of 0.0 s"),
        (1.0, 0.0, None, 10, "a ceiling of 0.0"),
        (1.0, 0.01, 0, 10, "every 0 iterations"),
        (1.0, 0.01, None, 0, "every 0 iterations"),
    ):
        assert sentence in refusal(
            ValueError, choose_frequency, lambda s: 0.0, iteration_s, ceiling=ceiling, forced=forced, largest=largest
        ), sentence


windows_ = st.lists(st.floats(0, 2), min_size=1, max_size=6).flatmap(
    lambda lengths: st.integers(1, len(lengths)).map(
        lambda before: [Window(n, n, n < before, 0.0, length) for n, length in enumerate(lengths)]
    )
)


@given(
    windows_,
    st.integers(0, 10**10),
    st.integers(1, 4),
    st.integers(1, 200).map(lambda mb: mb << 20),
    st.floats(1e8, 1e10),
    st.floats(0, 0.01),
    st.floats(0.3, 1),
    st.integers(1, 8),
)
def test_the_closed_form_is_what_the_plan_says(
    windows: list[Window], C: int, m: int, R: int, B: float, alpha: float, mu: float, s: int
) -> None:
    need = Need.from_windows(windows, C, m, R, 2, B, alpha, mu)
    late_s = schedule.plan_chunks(build_timeline(windows, s).T, C, m, R, 2, B, alpha, mu).late_s
    tiny = 1e-6
    assert max(0.0, need(s)) >= late_s - tiny
    # Each replica ends in a chunk of its own; one more is begun where the idle time ends in a chunk.
    assert max(0.0, need(s)) <= late_s + 2 * m * alpha + tiny
    assert need(s + 1) <= need(s)


# --- the controller, in simulated trainings ---


def run(
    controller: OverheadController, truth: Linear, cycles: int, noise: Callable[[], float] = lambda: 0.0
) -> list[Frequency]:
    """The frequencies that it went through."""
    seen = [controller.frequency]
    for _ in range(cycles):
        found = controller.observe_cycle(truth(controller.frequency.s) + noise())
        if (found.j, found.s) != (seen[-1].j, seen[-1].s):
            seen.append(found)
    return seen


def overhead(frequency: Frequency, truth: Linear, iteration_s: float) -> float:
    return truth(frequency.s) / (frequency.j * iteration_s)


@given(linear(fixed=st.floats(0, 3)), st.floats(0, 1), st.floats(0.5, 5), st.booleans())
def test_without_noise_it_finds_the_smallest(truth: Linear, hope: float, iteration_s: float, spread: bool) -> None:
    """The plan knows nothing of fixed_s and only of a part of what is to be sent."""
    planned = Linear(truth.send_s * hope, truth.before_s, truth.idle_s)
    controller = OverheadController(planned.signed, iteration_s, spread=spread)
    seen = run(controller, truth, 1200)
    best = choose_frequency(truth, iteration_s, spread=spread)
    last = seen[-1]
    if best.within:
        assert overhead(last, truth, iteration_s) <= 0.01 * (1 + 1e-9)
        assert all(frequency.j <= best.j + 1 for frequency in seen)
    else:
        assert last.j == LARGEST_J
    assert len(seen) <= 12
    assert [frequency.j for frequency in seen] == sorted(frequency.j for frequency in seen)
    assert len(run(controller, truth, 200)) == 1


noises: dict[str, Callable[[random.Random, float], float]] = {
    "gauss": lambda generator, size: generator.gauss(0, size),
    "one-sided": lambda generator, size: generator.expovariate(1 / size) - 0.6931 * size,
    "outliers": lambda generator, size: generator.gauss(0, size / 4) + 50 * size * (generator.random() < 0.05),
}


@settings(max_examples=60)
@given(
    linear(fixed=st.floats(0, 1)),
    st.floats(0, 1),
    st.floats(0.01, 0.5),
    st.booleans(),
    st.sampled_from(sorted(noises)),
    st.integers(0, 9),
)
def test_under_noise_it_settles_near_the_smallest(
    truth: Linear, hope: float, size: float, spread: bool, shape: str, seed: int
) -> None:
    generator = random.Random(seed)
    iteration_s = 1.0
    planned = Linear(truth.send_s * hope, truth.before_s, truth.idle_s)
    controller = OverheadController(planned.signed, iteration_s, spread=spread)
    seen = run(controller, truth, 3000, lambda: noises[shape](generator, size))
    best = choose_frequency(truth, iteration_s, spread=spread)
    last = seen[-1]
    assert len(seen) <= 16
    # In seconds a cycle: above the ceiling by no more than the median of the latest samples is uncertain.
    slack_s = size
    assert truth(last.s) <= 0.01 * last.j * iteration_s + slack_s
    assert last.j <= best.j + 1 + 0.5 * size / (0.01 * iteration_s)
    later = run(controller, truth, 1500, lambda: noises[shape](generator, size))
    assert len(later) <= 4


def test_it_does_not_creep_up_in_many_small_steps() -> None:
    for shape in sorted(noises):
        changes = 0
        for seed in range(8):
            generator = random.Random(seed)
            truth = Linear(send_s=0.0, before_s=0.0, idle_s=1.0, fixed_s=0.5)
            controller = OverheadController(Linear(0.0, 0.0, 1.0).signed, 1.0)
            changes += len(run(controller, truth, 4500, partial(noises[shape], generator, 0.5))) - 1
        assert changes <= 8 * 7, shape


def test_noise_alone_raises_nothing() -> None:
    for shape in sorted(noises):
        for size in (0.001, 0.01, 0.1, 1.0):
            generator = random.Random(3)
            truth = Linear(send_s=1.0, before_s=1.0, idle_s=1.0)
            controller = OverheadController(truth.signed, 1.0)
            noise = partial(noises[shape], generator, size)
            assert run(controller, truth, 10_000, noise) == [choose_frequency(truth, 1.0)], (shape, size)


def test_what_can_be_spread_is_spread_and_what_cannot_is_amortized() -> None:
    hope = Linear(send_s=1.0, before_s=1.0, idle_s=1.0)
    more = Linear(send_s=1.5, before_s=1.0, idle_s=1.0)
    controller = OverheadController(hope.signed, 1.0)
    assert [(frequency.j, frequency.s) for frequency in run(controller, more, 100)] == [(1, 1), (2, 2)]
    stall = Linear(send_s=1.0, before_s=1.0, idle_s=1.0, fixed_s=0.25)
    controller = OverheadController(hope.signed, 1.0)
    assert [(frequency.j, frequency.s) for frequency in run(controller, stall, 100)] == [(1, 1), (2, 2), (25, 1)]


def test_a_forced_j_is_never_changed() -> None:
    truth = Linear(send_s=5.0, before_s=1.0, idle_s=1.0, fixed_s=0.1)
    controller = OverheadController(Linear(1.0, 1.0, 1.0).signed, 1.0, forced=4)
    seen = run(controller, truth, 500)
    assert {frequency.j for frequency in seen} == {4}
    assert (seen[-1].s, seen[-1].within) == (4, False)


class TestReplan:
    hope = Linear(send_s=1.0, before_s=1.0, idle_s=1.0)
    stall = Linear(send_s=1.0, before_s=1.0, idle_s=1.0, fixed_s=0.25)

    def settled(self) -> OverheadController:
        controller = OverheadController(self.hope.signed, 1.0)
        assert run(controller, self.stall, 100)[-1].j == 25
        return controller

    def test_the_same_plan_again_changes_nothing(self) -> None:
        controller = self.settled()
        for step in range(20):
            again = Linear(1.0 + 0.04 * (-1) ** step, 1.0, 1.0)
            controller.replan(again.signed, 1.0)
            assert len(run(controller, self.stall, 50)) == 1
            assert 25 <= controller.frequency.j <= 26

    def test_what_has_passed_is_forgotten_with_the_next_plan(self) -> None:
        controller = self.settled()
        run(controller, self.hope, 200)
        assert controller.frequency.j == 25
        assert controller.replan(self.hope.signed, 1.0).j == 1

    def test_also_what_was_to_be_sent_beyond_the_plan(self) -> None:
        hope = Linear(send_s=1.0, before_s=0.0, idle_s=0.0)
        controller = OverheadController(hope.signed, 1.0)
        assert run(controller, Linear(2.0, 0.0, 0.0), 100)[-1].j == 200
        run(controller, hope, 200)
        assert controller.frequency.j == 200
        assert controller.replan(hope.signed, 1.0).j == 100

    def test_another_plan_is_believed(self) -> None:
        controller = self.settled()
        other = Linear(send_s=4.5, before_s=1.0, idle_s=1.0)
        found = controller.replan(other.signed, 1.0)
        assert found == choose_frequency(other, 1.0)
        assert run(controller, other, 200) == [found]

    def test_a_capture_is_planned_with_and_not_learnt(self) -> None:
        controller = OverheadController(self.hope.signed, 1.0, own_s=0.25)
        assert controller.frequency.j == 25
        assert len(run(controller, self.stall, 200)) == 1
        assert controller.replan(self.hope.signed, 1.0, 0.5).j == 50
        assert controller.replan(self.hope.signed, 1.0, 0.0).j == 1, "it has become small again"

    def test_what_else_a_version_costs_is_learnt_beside_it(self) -> None:
        controller = OverheadController(self.hope.signed, 1.0, own_s=0.25)
        both = Linear(send_s=1.0, before_s=1.0, idle_s=1.0, fixed_s=0.5)
        assert run(controller, both, 200)[-1].j == 50

    def test_a_j_smaller_by_one_is_not_worth_a_change(self) -> None:
        controller = OverheadController(Linear(5.0, 1.0, 1.0).signed, 1.0)
        assert controller.frequency.j == 5
        kept = controller.replan(Linear(4.0, 1.0, 1.0).signed, 1.0)
        assert (kept.j, kept.s) == (5, 4)
        assert controller.replan(Linear(3.0, 1.0, 1.0).signed, 1.0).j == 3
        assert controller.replan(Linear(6.0, 1.0, 1.0).signed, 1.0).j == 6

    @given(st.lists(linear(), min_size=1, max_size=5), st.floats(0.5, 5))
    def test_after_any_plans_j_is_at_most_one_above_the_smallest(
        self, plans: list[Linear], iteration_s: float
    ) -> None:
        controller = OverheadController(plans[0].signed, iteration_s)
        for plan in plans:
            controller.replan(plan.signed, iteration_s)
            found = run(controller, plan, 100)[-1]
            best = choose_frequency(plan, iteration_s)
            assert best.j <= found.j <= best.j + 1
            assert not best.within or overhead(found, plan, iteration_s) <= 0.01 * (1 + 1e-9)
