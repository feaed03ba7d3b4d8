"""The simulation agrees with the averages where these hold, and shows what they leave out."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.clock import DAY_S
from gemini_hpc.forecast.schemes import (
    SCHEMES,
    Scheme,
    TrainingFigures,
    build_gemini,
    build_highfreq,
    build_reft,
    build_strawman,
)
from gemini_hpc.forecast.simulation import Faults, NodeFailure, RunOutcome, simulate

NEVER = Scheme("never", 1e12)
SMALL = Scheme("small", 100.0, 10.0, usable_s=20.0, read_s=5.0, detect_s=1.0, save_s=2.0, restart_s=3.0)


def hit(*at_s: float, hardware: bool = False) -> list[NodeFailure]:
    return [NodeFailure(at, number, hardware) for number, at in enumerate(at_s)]


def run(scheme: Scheme, failures: list[NodeFailure], days: float = 0.01) -> RunOutcome:
    return simulate(scheme, NEVER, failures, nodes=4, days=days)


def test_without_failures_only_checkpoints_cost() -> None:
    out = run(SMALL, [])
    assert [out.useful_s, out.stalled_s] == pytest.approx([0.9 * 864, 0.1 * 864])


def test_one_failure_by_hand() -> None:
    """At 250 s there is the checkpoint of 200 s, since 220 s: 50 s are done again, after 11 s."""
    out = run(SMALL, hit(250.0))
    assert (out.repeated_s, out.down_s) == (50.0, 11.0)
    assert out.useful_s + out.stalled_s == pytest.approx(864 - 50 - 11)


def test_a_checkpoint_that_is_not_usable_yet_does_not_count() -> None:
    assert run(SMALL, hit(219.0)).repeated_s == 119.0


def test_a_failure_in_a_recovery_begins_it_anew_and_repeats_nothing_more() -> None:
    out = run(SMALL, hit(250.0, 255.0))
    assert (out.repeated_s, out.down_s, out.failures, out.recoveries) == (50.0, 16.0, 2, 1)


def test_memory_of_a_whole_group_is_gone_back_from_to_storage() -> None:
    """Nodes 0 and 1 keep each other's copies, and are lost in one recovery."""
    scheme, tier = Scheme("m=2", 10.0, restart_s=60.0, detect_s=0.0, replicas=2), Scheme("tier", 100.0, read_s=7.0)
    lost = hit(250.0, 260.0, hardware=True)
    both = simulate(scheme, tier, lost, nodes=4, days=0.01, standby=2)
    assert (both.from_tier, both.repeated_s) == (1, 50.0)
    apart = [lost[0], NodeFailure(260.0, 2, True)]
    assert simulate(scheme, tier, apart, nodes=4, days=0.01, standby=2).from_tier == 0
    software = [lost[0], NodeFailure(260.0, 1, False)]
    assert simulate(scheme, tier, software, nodes=4, days=0.01, standby=2).from_tier == 0


def test_without_a_standby_a_node_is_waited_for_and_repaired_ones_come_back() -> None:
    faults = Faults(repair_s=100.0, replace_s=40.0)
    lost = hit(100.0, 150.0, 400.0, hardware=True)
    out = simulate(SMALL, NEVER, lost, nodes=4, days=0.01, standby=1, faults=faults)
    assert out.waits == 1, "the second one; the first has been repaired by the third"


def test_a_node_that_was_waited_for_is_no_standby_of_the_job() -> None:
    """Without standby each loss waits, however many nodes have been repaired meanwhile."""
    faults = Faults(repair_s=100.0, replace_s=1.0)
    lost = hit(100.0, 250.0, 400.0, hardware=True)
    assert simulate(SMALL, NEVER, lost, nodes=4, days=0.01, faults=faults).waits == 3


def test_parity_serves_one_loss_in_a_group() -> None:
    """Groups of three: 0 to 2, and 3 to 7 with the rest."""
    scheme, tier = Scheme("parity", 10.0, restart_s=60.0, detect_s=0.0, parity=3), Scheme("tier", 100.0, read_s=7.0)

    def from_tier(*nodes: int, hardware: bool = True) -> int:
        lost = [NodeFailure(250.0 + at, node, hardware) for at, node in enumerate(nodes)]
        return simulate(scheme, tier, lost, nodes=8, days=0.01, standby=9).from_tier

    assert (from_tier(0), from_tier(0, 3), from_tier(0, 2), from_tier(3, 7)) == (0, 0, 1, 1)
    assert from_tier(0, 2, hardware=False) == 0


def test_rare_failures_cost_what_the_equation_says() -> None:
    t = TrainingFigures()
    for make in (build_gemini, build_reft, build_highfreq, build_strawman):
        scheme, per_day = make(t), 1.0
        faults = Faults(per_day / t.nodes, hardware=0.0)
        found = [
            simulate(scheme, NEVER, faults.draw_failures(t.nodes, 400, Random(seed)), nodes=t.nodes, days=400).goodput
            for seed in range(4)
        ]
        # The equation takes a failed program's time for time in which it could fail again.
        assert mean(found) == pytest.approx(
            scheme.compute_effective_share(per_day), abs=0.12 * (1 - scheme.compute_effective_share(per_day))
        )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(SCHEMES)),
    st.integers(2, 40),
    st.floats(0, 20),
    st.floats(0.4, 3),
    st.floats(0, 1),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_all_time_is_accounted_for(
    name: str, nodes: int, per_day: float, shape: float, hardware: float, standby: int, seed: int
) -> None:
    t = TrainingFigures(nodes)
    faults = Faults(per_day, hardware, shape)
    out = simulate(
        SCHEMES[name](t),
        build_strawman(t),
        faults.draw_failures(nodes, 3.0, Random(seed)),
        nodes=nodes,
        days=3.0,
        standby=standby,
        faults=faults,
    )
    parts = out.useful_s + out.stalled_s + out.repeated_s + out.down_s
    assert parts == pytest.approx(3 * DAY_S)
    assert min(out.useful_s, out.stalled_s, out.repeated_s, out.down_s) >= -1e-6


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.0])
def test_as_many_failures_as_asked_for_come_evenly_from_the_start(shape: float) -> None:
    """Nodes are of all ages: there is no burst at the beginning, and no calm."""
    found = list(Faults(0.5, shape=shape).draw_failures(400, 60, Random(3)))
    assert len(found) == pytest.approx(400 * 30, rel=0.05)
    first = sum(failure.at_s < 6 * DAY_S for failure in found)
    assert first == pytest.approx(len(found) / 10, rel=0.12)
    assert [f.at_s for f in found] == sorted(f.at_s for f in found)
    assert all(f.hardware for f in found) and not any(
        f.hardware for f in Faults(0.5, 0.0).draw_failures(9, 9, Random(1))
    )


def test_impossible_faults_are_refused() -> None:
    for faults in (Faults(-1.0), Faults(shape=0.0), Faults(hardware=2.0)):
        assert "failures a day" in refusal(ValueError, list, faults.draw_failures(4, 1, Random(1))), faults
