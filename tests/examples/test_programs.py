"""Every example runs: here without an agent, alone and by torchrun and as by srun; or in the test beside it."""

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
    "train_small.py": ("", "epoch 7:"),
    "train_huggingface.py": ("--steps 6", "global_step=6"),
    "train_lightning.py": ("--steps 6", "6 steps done"),
}
ELSEWHERE = {
    "canary_slurmd": "doctor/test_canary.py::test_the_example",
    "disk_or_memory.py": "examples/test_disk_or_memory.py::test_each_way_is_killed_once",
    "disk_or_memory.sh": "benchmarks/test_families.py::test_a_tiny_run_gives_every_figure",
    "health_check": "node/test_health_check.py::test_the_example",
    "heat_mpi.py": "mpi/test_archive.py::test_the_example_archives_its_plate",
    "heat_mpi.sh": "e2e/test_heat.py::test_a_node_is_cut",
    "quickstart.py": "examples/test_quickstart.py::test_a_killed_rank_resumes_bit_for_bit",
    "job.sh": "e2e/test_training.py::test_node_cut",
}


def test_each_example_has_a_test() -> None:
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == HERE.keys() | ELSEWHERE.keys()
    for name, test in ELSEWHERE.items():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), f"{name}: no {test}"


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("start", ["alone", pytest.param("torchrun", marks=pytest.mark.long), "srun"])
def test_it_trains(tmp_path: Path, name: str, start: str) -> None:
    arguments, ends = HERE[name]
    argv = [str(ROOT / "examples" / name), *arguments.split()]
    if start == "torchrun":
        launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--log-dir={tmp_path}"]
        argv = [*launch, f"--master-port={free_port()}", *argv]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_", "PMI"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    tasks = [env | srun_task(k) for k in range(2)] if start == "srun" else [env]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    processes = [subprocess.Popen([sys.executable, *argv], env=task, **pipes) for task in tasks]  # type: ignore[call-overload]
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    out, err = ("".join(parts) for parts in zip(*done, strict=True))
    assert [process.returncode for process in processes] == [0] * len(tasks), err[-4000:]
    assert ends in done[0][0], out[-2000:]
    said = [line for line in err.splitlines() if "gemini-hpc" in line]
    assert len(said) == 1 and "not protected: no agent here" in said[0], said


def srun_task(task: int) -> dict[str, str]:
    """Return what Slurm tells a task of `srun -n2` on one node, in a job without option and plugin."""
    of_step = {"JOB_ID": str(os.getpid()), "STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost"}
    of_task = {"STEP_TASKS_PER_NODE": "2", "NODEID": "0", "PROCID": str(task), "LOCALID": str(task)}
    return {f"SLURM_{name}": value for name, value in (of_step | of_task).items()}
