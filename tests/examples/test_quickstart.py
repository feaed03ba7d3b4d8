"""The first program that a newcomer runs: train_small.py, killed and resumed on this machine without Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_a_killed_rank_resumes_bit_for_bit(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_"))}
    env |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    argv = [sys.executable, str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(argv, check=False, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    story = done.stdout.splitlines()
    places = [
        next(k for k, line in enumerate(story) if what in line)
        for what in (
            "gemini-hpc: protected since step",
            ">>> rank 1 killed by SIGKILL after step 80",
            "rank 1 ended with SIGKILL; starting all ranks again: restart 1 of 3",
            "gemini-hpc: resumed at",
            "same weights as an undisturbed run, bit for bit",
        )
    ]
    assert places == sorted(places) and places[-1] == len(story) - 1, done.stdout
    assert story[places[3]].endswith(" s after the failure"), done.stdout
    assert not list(tmp_path.glob("gemini-*")), "its directory is left"
