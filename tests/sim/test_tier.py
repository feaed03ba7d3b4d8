"""Production agents and tier workers on a file system that fails, by seed: see `tier_stories`. A failure names its
seed; `python -m tests.sim.tier_stories NAME SEED` tells that one's story."""

from __future__ import annotations

import pytest

from .program import run_program
from .tier_stories import STORIES

_WITNESS = pytest.mark.witness("power fails in mid-save, and what the tier calls whole is whole")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("names", "seeds"),
    [
        pytest.param(["agents_die", "ill_nodes"], range(1, 2), id="one"),
        pytest.param(["power"], range(1, 3), id="power", marks=[pytest.mark.slow, _WITNESS]),
        pytest.param(list(STORIES), range(1, 5), id="all", marks=pytest.mark.slow),
    ],
)
def test_nothing_goes_wrong(names: list[str], seeds: range) -> None:
    run_program("tests.sim.tier_stories", *names, *seeds)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", STORIES)
def test_nothing_goes_wrong_in_many_runs(name: str) -> None:
    run_program("tests.sim.tier_stories", name, *range(1000, 1300), timeout_s=2900.0)


@pytest.mark.slow
def test_a_seed_repeats_a_run_to_the_letter() -> None:
    first, second = (run_program("tests.sim.tier_stories", "agents_die", 4) for _ in range(2))
    assert "is whole" in first and "dies" in first
    assert _without_place(first) == _without_place(second)


def _without_place(story: str) -> list[str]:
    """A run's directory has a name of its own."""
    return [" ".join(w for w in line.split() if "gemini-sim-tier-" not in w) for line in story.splitlines()]
