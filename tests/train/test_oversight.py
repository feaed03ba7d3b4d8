"""When a training has to be profiled again."""

from __future__ import annotations

import pytest

from gemini_hpc.core.frequency import Controller
from gemini_hpc.core.spans import Op, Trace, summarize
from gemini_hpc.train.oversight import IN_A_ROW, SETTLED, Oversight

USUAL_S = 1.0
OPS = (Op(1, 8, 0.2, 0.4), Op(2, 8, 0.6, 0.7))


@pytest.fixture
def seen() -> Oversight:
    profile = summarize([Trace(0.0, USUAL_S, 0.9, OPS)] * 3)
    made = Oversight(0.01)
    made.begin(profile, Controller(lambda s: 0.0, USUAL_S))
    return made


def iterations(seen: Oversight, length_s: float, waited_s: float, launched: int = len(OPS)) -> int:
    """Number of iterations until one is a reason; -1: none is."""
    for number in range(1, 4 * SETTLED):
        if seen.iteration(length_s, waited_s, launched, 1, saved=True):
            return number
    return -1


def test_as_it_was(seen: Oversight) -> None:
    assert iterations(seen, USUAL_S, 0.0) == -1
    assert seen.overhead == pytest.approx(0.0)


def test_waits_for_versions_are_a_reason_soon(seen: Oversight) -> None:
    assert 0 < iterations(seen, 1.1 * USUAL_S, 0.1) < 40


def test_slowness_without_waits_is_no_reason_for_long(seen: Oversight) -> None:
    assert SETTLED <= iterations(seen, 1.1 * USUAL_S, 0.0) < SETTLED + 40
    assert seen.overhead == pytest.approx(0.1)


def test_other_collectives(seen: Oversight) -> None:
    assert iterations(seen, USUAL_S, 0.0, len(OPS) + 1) == IN_A_ROW
