"""The training that `make bench ONLY=chaos` cuts power under: torch's own checkpoints, and what is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import outcome

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "programs" / "chaotic.py"


def train(directory: Path, steps: int) -> list[int]:
    """The steps that are made."""
    log = directory / "log"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = ["--way", "dcp", "--steps", str(steps), "--iteration", "0.01", "--every", "5"]
    argv = [sys.executable, str(PROGRAM), *words, "--log", str(log), "--directory", str(directory / "dcp")]
    subprocess.run(argv, env=env, check=True, timeout=100, capture_output=True)
    return [json.loads(line)["step"] for line in log.read_text().splitlines()[before:]]


@pytest.mark.timeout(240)
def test_dcp_goes_on_after_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    assert train(tmp_path, 12) == list(range(1, 13))
    kept = sorted(int(path.name) for path in (tmp_path / "dcp").iterdir())
    assert kept == [5, 10]
    (tmp_path / "dcp" / "15").mkdir()  # the power was cut before its last file was there
    assert train(tmp_path, 17) == list(range(11, 18))


def test_what_a_run_took() -> None:
    lines = [{"step": step, "t": float(step), "restart": 0} for step in range(1, 11)]
    lines += [{"step": step, "t": 20.0 + step, "restart": 1} for step in range(9, 14)]
    lines += [{"step": 13, "t": 99.0, "restart": 1}]  # made again after the last step had been there
    found = outcome(lines, cuts=1, steps=13)
    assert (found.took_s, found.calm_s, found.repeated, found.restarts) == (32.0, 12.0, 2, 1)
    assert found.lost_s == 20.0
