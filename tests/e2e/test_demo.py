"""The demonstration that a newcomer starts first, as the profile of a site sets Slurm up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


def test_a_demo_with_memory_limits_and_stock_timers(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    argv = ["demo", "--name", f"demo{os.getpid()}", "--profile", "site", "--steps", "20", "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, "-m", "gemini_hpc.cli.main", *argv], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (cut,) = json.loads(figures.read_text())["cuts"]
    assert cut["lost"] <= 1 and "identical bits" in done.stdout
