"""Requirement several-trainings: a set's holders are nodes that run ranks of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gemini_hpc.core import placement

from .fake_agent import FakeJob
from .launch import Run

pytestmark = pytest.mark.slow

MakeJob = Callable[[int, int], FakeJob]


def on(job: FakeJob, node_ranks: tuple[int, ...]) -> Run:
    """A training of one rank on each of some nodes of a job."""
    return Run(job, len(node_ranks), {"kind": "ddp", "steps": 6, "sleep_s": 0.02}, node_ranks)


def test_a_set_on_some_nodes_is_refused_where_a_holder_has_no_rank(make_job: MakeJob) -> None:
    run = on(make_job(4, 2), (1, 2))
    assert all(r["report"]["state"] == "unprotected" for r in run.wait())
    line = "ranks on only 2 of the job's 4 nodes: node rank 0 has to hold the copies of node rank 1, but has no ranks"
    assert run.stderr[0].count(line) == 1 and run.stderr[1].count("not protected") == 0


def test_a_set_on_whole_groups_is_protected(make_job: MakeJob) -> None:
    job = make_job(4, 2)
    run = on(job, (2, 3))
    results = run.wait()
    assert all(r.get("report", {}).get("state") == "protected" for r in results), (results, run.stderr)
    assert {(held.home, held.rank) for held in job.pairs()} == {(2, 0), (3, 1)}


def test_ranks_hold_for_those_that_their_agents_name(make_job: MakeJob) -> None:
    """Racks are kept apart: 0 and 2, 1 and 3."""
    job = make_job(4, 2)
    job.order = placement.PlacementOrder((0, 2, 1, 3))
    run = on(job, (0, 1, 2, 3))
    results = run.wait()
    assert all(r.get("report", {}).get("state") == "protected" for r in results), (results, run.stderr)
    held = {rank: {pair.home for pair in node.held.values()} for rank, node in enumerate(job.nodes)}
    assert held == {0: {0, 2}, 2: {0, 2}, 1: {1, 3}, 3: {1, 3}}


def test_a_set_on_side_by_side_nodes_of_other_groups_is_refused(make_job: MakeJob) -> None:
    job = make_job(4, 2)
    job.order = placement.PlacementOrder((0, 2, 1, 3))
    run = on(job, (0, 1))
    assert all(r["report"]["state"] == "unprotected" for r in run.wait())
    assert "node rank 2 has to hold the copies of node rank 0, but has no ranks" in run.stderr[0]


@pytest.mark.parametrize(
    ("nodes", "N", "m", "lacking"),
    [
        ((0, 1, 2), 3, 2, None),
        ((0, 1), 3, 2, (1, 2)),
        ((0, 1), 4, 2, None),
        ((1, 2), 4, 2, (1, 0)),
        ((3,), 4, 1, None),
    ],
)
def test_where_the_holders_are(nodes: tuple[int, ...], N: int, m: int, lacking: tuple[int, int] | None) -> None:
    assert placement.find_stranger({node: placement.list_holders(node, N, m) for node in nodes}) == lacking
