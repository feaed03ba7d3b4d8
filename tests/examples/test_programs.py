"""Every example runs: here by torchrun without an agent, or in the test that is named beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
# its arguments, and what it prints at its end
HERE = {
    "train_gpt.py": ("--steps 3 --workers 0 --layers 1 --dim 32", "rank 0: 3 steps done"),
    "train_huggingface.py": ("--steps 6", "global_step=6"),
    "train_lightning.py": ("--steps 6", "6 steps done"),
}
ELSEWHERE = {
    "disk_or_memory.py": "examples/test_disk_or_memory.py::test_each_way_is_killed_once",
    "disk_or_memory.sh": "benchmarks/test_families.py::test_a_tiny_run_gives_every_figure",
    "health_check": "node/test_health_check.py::test_the_example",
    "heat_mpi.py": "mpi/test_archive.py::test_the_example_archives_its_plate",
    "heat_mpi.sh": "e2e/test_heat.py::test_a_node_is_cut",
    "job.sh": "e2e/test_training.py::test_node_cut",
}


def test_each_example_has_a_test() -> None:
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == HERE.keys() | ELSEWHERE.keys()
    for name, test in ELSEWHERE.items():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), f"{name}: no {test}"


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_it_trains(tmp_path: Path, name: str, world: int) -> None:
    arguments, ends = HERE[name]
    argv = [str(ROOT / "examples" / name), *arguments.split()]
    if world > 1:
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--log-dir={tmp_path}"]
        argv = [*launch, f"--master-port={free_port()}", *argv]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert ends in done.stdout, done.stdout[-2000:]
    said = [line for line in done.stderr.splitlines() if "gemini-hpc" in line]
    assert len(said) == 1 and "not protected: no agent here" in said[0], said
