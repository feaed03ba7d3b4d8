"""The figure of goodput: its arithmetic, and what the page says of it."""

from __future__ import annotations

from functools import cache
from math import exp

import pytest

from gemini_hpc.forecast import goodput
from gemini_hpc.forecast.goodput import LLAMA_PER_DAY, RSC_PER_DAY, GoodputRow, count_standby


@cache
def every() -> dict[tuple[int, str], GoodputRow]:
    return {(row.gpus, row.way): row for row in goodput.compute_rows()}


def of(gpus: int, way: str) -> GoodputRow:
    return every()[gpus, way]


def test_the_rates_are_those_that_are_printed() -> None:
    between_h, in_all = 24 / (2048 * RSC_PER_DAY), 54 * 2048 * LLAMA_PER_DAY
    assert [between_h, in_all] == pytest.approx([1.8, 419])


def test_standby_is_a_quantile() -> None:
    """With one node under repair on the average: P(> 3) is 1.9 %, P(> 4) 0.37 %."""
    assert count_standby(100, 0.01) == 4
    assert 1 - exp(-1) * (1 + 1 + 1 / 2 + 1 / 6) > 0.01
    assert count_standby(100, 0.0) == 0


def test_a_share_is_near_what_the_average_says() -> None:
    for row in every().values():
        between_s = row.allowed_s * goodput.GOAL / (1 - goodput.GOAL)
        # Failures in a recovery begin it anew, and one in a hundred waits for a node.
        assert row.goodput == pytest.approx(between_s / (between_s + row.lost_s), abs=0.04), row


def test_the_goal_at_10_000_is_missed_by_a_hair_and_kept_with_fewer_failures() -> None:
    spare, requeued = of(10_000, "ours, with a spare"), of(10_000, "ours, by requeue")
    assert 0.994 < spare.goodput < goodput.GOAL < spare.gentle
    assert requeued.gentle < goodput.GOAL and spare.paid < goodput.GOAL


def test_at_100_000_no_way_is_enough() -> None:
    assert max(row.gentle for row in every().values() if row.gpus == 100_000) < 0.98
    assert of(100_000, "ours, with a spare").goodput < of(100_000, "the same with NCCLX").goodput


def test_spares_are_paid_for() -> None:
    for row in every().values():
        nodes = row.gpus / 8
        assert row.standby > 0 and row.paid == pytest.approx(row.goodput * nodes / (nodes + row.standby))
