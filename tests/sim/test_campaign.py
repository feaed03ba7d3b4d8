"""Simulated clusters by seed: a few of them, in processes of their own (`make sim` runs as many as you like)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from quick import part

from . import controls

ROOT = Path(__file__).parents[2]


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_nothing_goes_wrong() -> None:
    done = simulate("--seeds", str(part(8)), "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_goes_wrong_with_spares() -> None:
    done = simulate("--spares", "--seeds", str(part(8)), "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_goes_wrong_with_live_replicas() -> None:
    done = simulate("--live", "--seeds", str(part(8)), "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_goes_wrong_with_parity() -> None:
    done = simulate("--xor", "--seeds", str(part(8)), "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_repeats_a_run_to_the_letter() -> None:
    first, second = simulate("--seed", "12"), simulate("--seed", "12")
    assert first.returncode == 0 and "resumed" in first.stdout and "FAULT" in first.stdout, first.stderr
    assert first.stdout == second.stdout


# Within so many seeds the absence of each rule shows, most in the first few. FIRST: where to look for the others.
_SEEDS = 30
_FIRST = {
    "skips-are-not-told": 65,
    "seals-are-forgotten": 40,
    "half-a-pair-votes": 14,
    "votes-not-kept": 10,
    "nothing-is-abandoned": 10,
    "live-is-forgotten": 7,
    "losses-are-not-told": 45,
    "any-part-goes-on": 9,
    "nobody-is-held": 35,
    "any-version-will-do": 10,
    "a-seal-frees-what-was-rescued": 32,
    "only-who-keeps-outlines": 29,
    "one-version-folds-into-another": 6,
    "half-of-it-counts": 15,
    "nobody-makes-what-is-lost": 7,
    "seals-without-parity": 19,
}


@pytest.mark.parametrize("rule", controls.CONTROLS)
def test_what_is_broken_on_purpose_is_found(rule: str) -> None:
    done = simulate("--broken", rule, "--first", str(_FIRST.get(rule, 1)), "--seeds", str(_SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", controls.SPARED)
def test_what_is_broken_in_jobs_with_spares_is_found(rule: str) -> None:
    first = str(_FIRST.get(rule, 1))
    done = simulate("--spares", "--broken", rule, "--first", first, "--seeds", str(_SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", controls.LIVE)
def test_what_is_broken_in_jobs_with_live_replicas_is_found(rule: str) -> None:
    done = simulate("--live", "--broken", rule, "--first", str(_FIRST.get(rule, 1)), "--seeds", str(_SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", controls.XOR)
def test_what_is_broken_in_jobs_with_parity_is_found(rule: str) -> None:
    done = simulate("--xor", "--broken", rule, "--first", str(_FIRST.get(rule, 1)), "--seeds", str(_SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
