"""Simulated clusters by seed: a few of them, in processes of their own (`make sim` runs as many as you like)."""

from __future__ import annotations

import pytest

from .program import run_program

_WITNESS = pytest.mark.witness("agents, links, disks and nodes fail at drawn moments, and nothing sealed is lost")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "first", "seeds"),
    [
        pytest.param([], 1, 1, id="one"),
        pytest.param([], 2, 2, id="two", marks=[pytest.mark.slow, _WITNESS]),
        pytest.param([], 4, 5, id="more", marks=pytest.mark.slow),
        pytest.param(("--spares",), 1, 8, id="spares", marks=pytest.mark.slow),
        pytest.param(("--live",), 1, 8, id="live", marks=pytest.mark.slow),
        pytest.param(("--xor",), 1, 8, id="parity", marks=pytest.mark.slow),
        pytest.param(("--miscounts",), 1, 8, id="miscounts", marks=pytest.mark.slow),
        pytest.param(("--rdma",), 1, 8, id="rdma", marks=pytest.mark.slow),
        pytest.param(("--rdma",), 123, 1, id="no-connection", marks=pytest.mark.slow),
    ],
)
def test_nothing_goes_wrong(kind: list[str], first: int, seeds: int) -> None:
    run_program("tests.sim", *kind, "--first", first, "--seeds", seeds, "--jobs", 1)


@pytest.mark.slow
def test_a_seed_repeats_a_run_to_the_letter() -> None:
    first, second = (run_program("tests.sim", "--seed", 12) for _ in range(2))
    assert "resumed" in first and "FAULT" in first
    assert first == second


@pytest.mark.slow
def test_versions_go_by_rdma_where_it_works() -> None:
    story = run_program("tests.sim", "--rdma", "--seed", 2)
    assert story.count("RDMA: bytes") > 20 and "TCP instead of RDMA" in story
