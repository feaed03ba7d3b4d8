"""Simulated sites by seed, in processes of their own: `python -m tests.sim.scenarios NAME --seed N` tells a story."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from quick import part

ROOT = Path(__file__).parents[2]
NAMES = (
    "success",
    "power",
    "ends-early",
    "fails",
    "controller-killed",
    "slurmctld-killed",
    "busy",
    "hangs",
    "cut-off",
    "survivor-cut",
    "hung-and-cut",
    "backup",
    "no-controller",
    "reboot",
    "second",
    "outage",
    "chaos",
    "neighbours",
    "both",
    "budgets",
    "waits",
    "drained-dies",
    "drains",
    "cancels",
    "holds",
    "requeues",
    "suspends",
    "downs",
    "reboots",
    "maintains",
)


def simulate(*words: str, program: str = "tests.sim.scenarios") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_nothing_goes_wrong(name: str) -> None:
    done = simulate(name, "--seeds", str(part(2)))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_nothing_goes_wrong_for_many(name: str) -> None:
    done = simulate(name, "--first", "1000", "--seeds", "150")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["power", "controller-killed", "backup"])
def test_a_seed_repeats_a_run_to_the_letter(name: str) -> None:
    first, second = simulate(name, "--seed", "7"), simulate(name, "--seed", "7")
    assert first.returncode == 0 and "FAULT" in first.stdout and "resumed" in first.stdout, first.stderr
    assert first.stdout == second.stdout


_BROKEN = [
    ("no-reservation", "busy", 8, "survivors"),
    ("keeps-reservations", "power", 2, "held"),
    ("fences-living-kernels", "hangs", 6, "healthy"),
    ("no-budget", "outage", 2, "budget"),
    ("starts-now", "power", 3, "ended"),
    ("resumes-nothing", "controller-killed", 20, "held"),
    ("tells-once", "backup", 20, "ended"),
    ("looks-away", "ends-early", 10, "ended"),
    ("no-user-budget", "budgets", 1, "budget of a user"),
    ("anybodys-candidates", "neighbours", 8, "candidates"),
    ("takes-drains-for-ours", "drained-dies", 4, "administrator"),
    ("sends-back-the-cancelled", "cancels", 20, "administrator"),
]


@pytest.mark.parametrize(("broken", "name", "seeds", "found"), _BROKEN)
def test_what_is_broken_on_purpose_is_found(broken: str, name: str, seeds: int, found: str) -> None:
    done = simulate(name, "--broken", broken, "--seeds", str(seeds))
    assert done.returncode == 1 and f"Wrong: {found}" in done.stdout, done.stdout + done.stderr


# the seed to begin with: of today's code the first that finds it
_MIXED = [
    ("keeps-reservations", "held", 2),
    ("resumes-nothing", "held", 2),
    ("fences-living-kernels", "healthy", 4),
    ("anybodys-candidates", "candidates", 4),
    ("no-budget", "budget", 10),
]


@pytest.mark.parametrize(("broken", "found", "first"), _MIXED)
def test_the_mix_comes_to_what_is_broken_by_itself(broken: str, found: str, first: int) -> None:
    """No scenario leads there: what is drawn does, for each of these within 15 seeds when this was written."""
    words = ("--site", "--broken", broken, "--first", str(first), "--seeds", "40")
    done = simulate(*words, program="tests.sim")
    assert done.returncode == 0 and f"Wrong: {found}" in done.stdout, done.stdout + done.stderr
