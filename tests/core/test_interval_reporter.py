"""Lines for the user about versions that are not saved."""

from __future__ import annotations

import pytest

from gemini_hpc.core.interval_reporter import IntervalReporter, Reason, explain_late_seals
from gemini_hpc.core.wait_budget import FIRST_S, WaitBudget


def why(news: bool) -> Reason:
    return Reason("it is slow, looked at closely" if news else "it is slow", "a faster one")


def test_the_first_time_and_whenever_versions_are_four_times_as_rare() -> None:
    said: list[str] = []
    reporter = IntervalReporter(1, 0.01, said.append)
    for j in (1, 2, 3, 7, 8, 31, 32, 1):
        reporter.report(j, 2, why, is_cause=True)
    assert [line.partition("; ")[0] for line in said] == [
        f"rank 1: it is slow, looked at closely: saving one version in {j}" for j in (2, 8, 32)
    ]
    assert said[0].endswith("; a failure repeats at most 3 steps")
    assert reporter.reason == ""
    reporter.report(5, 2, why, is_cause=True)
    assert reporter.reason == "it is slow; what helps: a faster one"
    reporter.report(5, 2, why, is_cause=False)
    assert reporter.reason == "", "another rank needs it now"


def test_a_rank_whose_part_is_cheap_says_nothing() -> None:
    said: list[str] = []
    reporter = IntervalReporter(0, 0.01, said.append)
    reporter.report(9, 9, why, is_cause=False)
    reporter.report(9, 9, why, is_cause=True)
    assert (said, reporter.reason) == ([], "it is slow; what helps: a faster one"), "another rank has said it"


def test_advice_in_place_of_consequences() -> None:
    said: list[str] = []
    IntervalReporter(0, 0.01, said.append).report(9, 9, why, is_cause=True, advice="pass Traffic(every=9)")
    assert said == ["rank 0: it is slow, looked at closely: pass Traffic(every=9)"]


@pytest.mark.parametrize(("rank", "waited_s", "lines"), [(0, 2.0, 1), (1, 2.0, 0), (0, 0.5, 0)])
def test_what_the_first_versions_have_cost(rank: int, waited_s: float, lines: int) -> None:
    said: list[str] = []
    reporter, budget = IntervalReporter(rank, 0.02, said.append, "program"), WaitBudget(0.02)
    budget.spend(waited_s)
    assert not reporter.settled and budget.left_s == FIRST_S - waited_s
    for _ in range(2):
        reporter.end_first_phase(budget)
    assert reporter.settled and budget.left_s == 1.5 and len(said) == lines
    assert not said or said[0].endswith(
        "the program has waited 2.0 s for its first versions; from now on versions take at most 2 % of its time"
    )


def test_late_seals() -> None:
    found = explain_late_seals(0.871, 0.107)
    assert found.why == "a version is sealed 0.87 s after step() (copy, digests, votes) in iterations of 0.11 s"
    assert found.helps.startswith("fewer bytes a rank")
