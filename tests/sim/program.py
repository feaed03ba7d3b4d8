"""A program of the simulation, as the tests run it: many stories in one process, which patches what it likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(module: str, *words: object, timeout_s: float = 590.0) -> str:
    """Return what `python -m MODULE WORDS` prints. Raises AssertionError where its exit status is not 0."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout
