"""The interval of saves to the tier: its formula and its bounds."""

from __future__ import annotations

from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.tier_interval import (
    AUTO,
    COST,
    DAY_S,
    MOST_S,
    choose_interval_s,
    compute_interval_s,
    compute_unserved_per_day,
)
from gemini_hpc.node import prolog


def test_the_interval_that_costs_least() -> None:
    """REFT, equation 5."""
    assert compute_interval_s(100.0, 0.01, 0.1) == pytest.approx(sqrt(2 * 1.0 * DAY_S / 0.1))
    assert compute_interval_s(100.0, 0.01, 0.0) == inf
    assert compute_interval_s(5000.0, 0.01, 1e6) == 5000.0


@given(st.floats(1, 1e5), st.floats(1e-3, 10))
def test_no_other_interval_costs_less(save_s: float, lost_a_day: float) -> None:
    """What saves cost, and the half of an interval that is lost with each failure, as shares of the time."""

    def cost(interval_s: float) -> float:
        return COST * save_s / interval_s + lost_a_day / DAY_S * interval_s / 2

    best = compute_interval_s(save_s, COST, lost_a_day)
    if best > save_s:
        assert cost(best) <= min(cost(0.9 * best), cost(1.1 * best))


def test_a_group_that_is_lost() -> None:
    """Where m divides N: a first loss in N f, and each of the others of its group within the window."""
    for nodes, replicas in ((64, 2), (60, 3), (4, 4), (5, 1)):
        found = compute_unserved_per_day(Redundancy(nodes, replicas), 0.01, 600.0)
        assert found == pytest.approx(nodes * 0.01 * (0.01 * 600 / DAY_S) ** (replicas - 1)), (nodes, replicas)


def test_a_ring_is_lost_more_often_than_a_group() -> None:
    assert (
        compute_unserved_per_day(Redundancy(5, 2), 0.01, 600.0) / 5
        > compute_unserved_per_day(Redundancy(4, 2), 0.01, 600.0) / 4
    )


def test_automatic_has_bounds() -> None:
    assert choose_interval_s(100.0, 0.0) == choose_interval_s(100.0, 1e-9) == MOST_S
    assert choose_interval_s(100.0, 1e9) == 100.0 and choose_interval_s(2 * MOST_S, 0.0) == 2 * MOST_S
    assert 100.0 < choose_interval_s(100.0, 1.0) < choose_interval_s(100.0, 0.1) < MOST_S
    assert choose_interval_s(10.0, 1.0) < choose_interval_s(100.0, 1.0)


def test_root_has_the_same_word() -> None:
    assert prolog.AUTO == AUTO
