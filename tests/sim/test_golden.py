"""The stories that are checked in are those of this code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import golden


@pytest.mark.slow
def test_the_stories_are_those_of_this_code() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.sim.golden", "--check"]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    told = f"{golden.COMMAND} writes the stories anew; read what has changed, and whether it should have"
    assert done.returncode == 0, f"{told}\n{done.stdout[:6000]}{done.stderr[-2000:]}"
    names = {path.stem for path in golden.DIRECTORY.glob("*.txt")}
    assert names == set(golden.STORIES), "each file belongs to a story"
