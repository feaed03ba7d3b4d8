"""The interval between saved steps of an MPI program: it keeps the ceiling, and is the same on all ranks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_hpc.mpi.interval import Interval


def run(
    intervals: list[Interval], steps: int, cost: list[float], iteration: list[float], first: int = 1
) -> list[int]:
    """Let ranks make steps of these lengths; return the saved ones. All ranks must agree on each."""
    saved = []
    for step in range(first, first + steps):
        for interval, length in zip(intervals, iteration, strict=True):
            interval.ended(length)
        answers = {interval.saves(step) for interval in intervals}
        assert len(answers) == 1, "some ranks save, others do not"
        if not answers.pop():
            continue
        wanted = [interval.wanted() for interval in intervals]
        reports = {interval.agree(step, wanted) for interval in intervals}
        assert len(reports) == 1 and len({interval.j for interval in intervals}) == 1
        for interval, seconds in zip(intervals, cost, strict=True):
            interval.saved(seconds)
        saved.append(step)
    return saved


def test_cheap_steps_are_all_saved() -> None:
    ranks = [Interval(0, 0.01) for _ in range(2)]
    assert run(ranks, 30, [0.0005, 0.001], [0.01, 0.01]) == list(range(1, 31))


def test_a_dear_step_is_saved_as_rarely_as_the_ceiling_requires() -> None:
    ranks = [Interval(0, 0.01) for _ in range(3)]
    saved = run(ranks, 400, [0.01, 0.05, 0.01], [0.5, 0.5, 0.5])
    assert ranks[0].j == 10 and saved[:4] == [1, 2, 3, 4], "the fourth one knows three costs"
    late = [s for s in saved if s > 20]
    assert {b - a for a, b in pairwise(late)} == {10}
    assert len(late) * 0.05 <= 0.01 * 0.5 * 400


def test_an_interval_does_not_swing() -> None:
    """Saving rarely makes a saved step cheap, and then saving often makes it dear again."""
    rank, step, changes, before = Interval(0, 0.01), 1, 0, 1
    for _ in range(200):
        cost = 0.1 if rank.j < 10 else 0.003
        step = run([rank], 1000, [cost], [1.0], step)[-1] + 1
        changes += rank.j != before
        before = rank.j
    assert changes <= 3 and rank.j == 10


def test_a_program_that_becomes_slower_is_saved_more_often() -> None:
    rank = Interval(0, 0.01)
    last = run([rank], 500, [0.05], [0.1])[-1]
    assert rank.j == 50
    run([rank], 1000, [0.05], [10.0], last + 1)
    assert rank.j == 1


def test_a_given_interval_is_kept() -> None:
    assert run([Interval(3, 0.01)], 12, [1.0], [0.01]) == [3, 6, 9, 12]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 5), min_size=3, max_size=3), st.lists(st.floats(0, 5), min_size=3, max_size=3)
        ),
        max_size=30,
    )
)
def test_all_ranks_save_the_same_steps(phases: list[tuple[list[float], list[float]]]) -> None:
    ranks, step = [Interval(0, 0.01) for _ in range(3)], 1
    for cost, iteration in phases:
        run(ranks, 7, cost, iteration, step)
        step += 7
