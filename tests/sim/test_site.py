"""Simulated sites by seed, in processes of their own: `python -m tests.sim.scenarios NAME --seed N` tells a story."""

from __future__ import annotations

import pytest

from .program import run_program
from .scenarios import SCENARIOS

_SAMPLE = ("power", "ends-early", "ends-well", "no-kill")
_WITNESS = pytest.mark.witness(
    "Slurm, controller, agents and nodes fail at drawn moments, and the job comes to its end"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("names", "seeds"),
    [
        pytest.param(_SAMPLE, 1, id="sample"),
        pytest.param(("chaos",), 2, id="chaos", marks=[pytest.mark.slow, _WITNESS]),
        pytest.param([n for n in SCENARIOS if n != "chaos"], 2, id="all", marks=pytest.mark.slow),
    ],
)
def test_nothing_goes_wrong(names: list[str], seeds: int) -> None:
    run_program("tests.sim.scenarios", *names, "--seeds", seeds)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "mix"])
def test_nothing_goes_wrong_for_many(name: str) -> None:
    run_program("tests.sim.scenarios", name, "--first", 1000, "--seeds", 150, timeout_s=2900.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["power", "controller-killed", "backup"])
def test_a_seed_repeats_a_run_to_the_letter(name: str) -> None:
    first, second = (run_program("tests.sim.scenarios", name, "--seed", 7) for _ in range(2))
    assert "FAULT" in first and "resumed" in first
    assert first == second
