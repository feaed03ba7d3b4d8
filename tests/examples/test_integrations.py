"""The example scripts of other stacks, started by torchrun without an agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train.launch import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("stack", ["huggingface", "lightning"])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_it_trains(tmp_path: Path, stack: str, world: int) -> None:
    script = str(ROOT / "examples" / f"train_{stack}.py")
    argv = [sys.executable, script]
    if world > 1:
        argv = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--log-dir={tmp_path}"]
        argv += [f"--master-port={free_port()}", script]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*argv, "--steps", "6"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "global_step=6" in done.stdout or "6 steps done" in done.stdout, done.stdout[-2000:]
    said = [line for line in done.stderr.splitlines() if "gemini-hpc" in line]
    assert len(said) == 1 and "not protected: no agent here" in said[0], said
