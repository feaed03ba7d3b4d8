"""What `gemini-hpc plan` says, against counting and against a simulation."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from refusals import refusal

from gemini_hpc.core import placement
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.tier_interval import compute_unserved_per_day
from gemini_hpc.forecast.protection import RequestedProtection, predict_protection
from gemini_hpc.forecast.schemes import TrainingFigures
from gemini_hpc.forecast.simulation import Faults

WISH = RequestedProtection(TrainingFigures(64, 1.2e12, 20.0, 25e9, 2.5e9), 500e9)


def test_memory_is_two_slots_of_each_copy() -> None:
    two, three = predict_protection(WISH, 2), predict_protection(WISH, 3)
    assert (two.needed_bytes, three.needed_bytes) == (4 * 1.2e12 / 64, 6 * 1.2e12 / 64)
    assert two.fits and three.fits
    assert not predict_protection(replace(WISH, memory_bytes=74e9), 2).fits


def test_what_the_idle_spans_take_in_costs_nothing() -> None:
    one = predict_protection(WISH, 2)
    assert (one.every, one.over, one.repeated, one.overhead, one.within) == (1, 1, 1, 0.0, True)
    assert one.transfer_s == pytest.approx(0.75) and one.lost_s == 30.0


def test_a_slow_network_makes_versions_rarer() -> None:
    slow = predict_protection(replace(WISH, training=replace(WISH.training, network=1e9)), 2)
    assert slow.every > 1 and slow.within and slow.overhead <= 0.01 and slow.repeated == slow.every + slow.over - 1
    busy = predict_protection(replace(WISH, idle=0.0), 2)
    assert busy.every == pytest.approx(0.75 / 20.0 / 0.01, abs=1.0)


def test_survival_is_that_of_the_placement() -> None:
    one = predict_protection(WISH, 2)
    assert one.survival == {k: placement.compute_recovery_probability(64, 2, k) for k in range(1, 6)}
    assert predict_protection(replace(WISH, training=replace(WISH.training, nodes=2)), 2).survival == {1: 1.0, 2: 0.0}


@pytest.mark.parametrize("m", [2, 3])
def test_how_often_memory_does_not_serve_is_what_a_simulation_shows(m: int) -> None:
    """Nodes that fail often, so that it happens: each loss lasts `window_s`, and groups are counted that have none
    left."""
    nodes, per_day, days, window_s = 12, 3.0, 4000, 1200.0
    down: dict[int, float] = {}
    found = 0
    for failure in Faults(per_day).draw_failures(nodes, days, Random(1)):
        down = {node: at for node, at in down.items() if failure.at_s - at < window_s}
        down[failure.node] = failure.at_s
        if not placement.can_survive(nodes, m, down):
            found += 1
            down.clear()
    expected = compute_unserved_per_day(Redundancy(nodes, m), per_day, window_s) * days
    assert found == pytest.approx(expected, rel=0.2)


def test_one_copy_leaves_failures_of_nodes_to_the_tier() -> None:
    one, two = predict_protection(WISH, 1), predict_protection(WISH, 2)
    assert one.unserved_per_day == pytest.approx(64 * 0.015 * 0.5)
    assert one.tier_every_s < two.tier_every_s and one.effective < two.effective
    assert one.transfer_s == 0.0 and one.survival[1] == 0.0


def test_impossible_copies_are_refused() -> None:
    for m in (0, 65):
        assert "replicas on 64 nodes" in refusal(ValueError, predict_protection, WISH, m), m


def test_parity_takes_less_memory_and_survives_less() -> None:
    two, four = predict_protection(WISH, 2), predict_protection(WISH, 4, parity=1)
    assert four.needed_bytes == pytest.approx(two.needed_bytes * (1 + 1 / 3) / 2)
    assert four.transfer_s == two.transfer_s and four.down_s[0] > two.down_s[0], "sends as much, reads more"
    codes = predict_protection(WISH, 6, parity=2)
    assert codes.needed_bytes == pytest.approx(1.5 * 2 * 1.2e12 / 64) and codes.transfer_s == 2 * four.transfer_s
    assert [two.fold_s, codes.fold_s] == pytest.approx([0.0, 2 * four.fold_s]) and codes.name == "rs:4+2"
    assert codes.survival[2] == 1.0 > codes.survival[3] and codes.unserved_per_day < four.unserved_per_day
    assert four.survival[1] == 1.0 and four.survival[2] < two.survival[2]
    assert four.unserved_per_day > two.unserved_per_day and four.tier_every_s < two.tier_every_s
    with pytest.raises(ValueError, match="groups of 1 nodes"):
        predict_protection(WISH, 1, parity=1)
