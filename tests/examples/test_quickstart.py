"""The first program that a newcomer runs: train_small.py, killed and resumed on this machine without Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
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


def test_without_torch_it_names_the_command_of_the_readme(tmp_path: Path) -> None:
    """Run it where gemini-hpc is installed with what it requires, and nothing else."""
    for name in ("gemini_hpc", "msgspec"):
        (tmp_path / name).symlink_to(Path(find_spec(name).submodule_search_locations[0]))  # type: ignore[union-attr,index]
    argv = [sys.executable, "-S", str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(
        argv, check=False, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    command = done.stderr.rpartition(": ")[2].strip()
    assert "has no torch" in done.stderr and command in (ROOT / "README.md").read_text()
