"""The example that measures a user's own model, by hand: no agent here, and whoever runs it starts it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch
def build():
    return torch.nn.Linear(64, 64), lambda model: model(torch.ones(1, 64)).sum()
"""


def run(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_"))} | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, str(ROOT / "examples" / "disk_or_memory.py"), *words]
    return subprocess.run(argv, cwd=where, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_each_way_is_killed_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "disk_or_memory.pt").write_bytes(b"of another job")
    (tmp_path / "disk_or_memory.8.pt").write_bytes(b"of another job")
    words = ["--model", "mine:build", "--iterations", "20", "--every", "5", "--kill-at", "13"]
    assert [run(tmp_path, *words).returncode for _ in range(2)] == [-signal.SIGKILL] * 2, "once for each way"
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    head, _, saves, loads, rates, repeated = done.stdout.splitlines()
    assert head == "one rank, 0.0499 MB of state" and all(line.endswith(" x") for line in (saves, loads, rates))
    assert repeated.split() == ["iterations", "repeated", "3", "13"], (
        "from the file of iteration 10; there is no agent"
    )


def test_what_cannot_be_measured_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "--iterations", "20", "--every", "30")
    assert done.returncode == 2 and "wanted 4 <= --every <= --kill-at < --iterations" in done.stderr
