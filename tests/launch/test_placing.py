from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_hpc.launch import placing
from gemini_hpc.wire import local

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "18",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "GEMINI_SPARES": "1",
}


def test_ranks_follow_the_place_and_not_slurms_task_numbers() -> None:
    found = placing.build_rank_environment(SLURM, local.Place(0, 3, "n2", 20000))
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n2",
        "MASTER_PORT": "20002",
    }


@pytest.mark.parametrize("text", ["2(x3),1", "0", "x", "1,2", "9" * 40])
def test_uneven_steps_are_refused(text: str) -> None:
    with pytest.raises(placing.Uneven, match="same number of tasks"):
        placing.count_tasks_per_node({"SLURM_STEP_TASKS_PER_NODE": text})


def test_without_an_agent_the_first_nodes_train() -> None:
    place = placing.place_without_agent(SLURM)
    assert (place.node_rank, place.nodes, place.master) == (2, 3, "n1")
    assert placing.place_without_agent(SLURM | {"SLURM_NODEID": "3"}).node_rank == -1
    with pytest.raises(ValueError, match="host"):
        placing.place_without_agent(SLURM | {"SLURM_JOB_NODELIST": "n[1-"})


@pytest.mark.parametrize(
    ("more", "status", "out", "err"),
    [
        ({}, 0, "5 6 n1", ""),
        ({"SLURM_NODEID": "3"}, 0, "", "this spare stays idle"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, 2, "", "same number of tasks"),
        ({"SLURM_JOB_NODELIST": ""}, 2, "", "launch: "),
    ],
)
def test_a_job_with_spares_and_no_agent(
    tmp_path: Path, more: dict[str, str], status: int, out: str, err: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nprint(*map(os.environ.get, ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')))\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "GEMINI_"))} | SLURM | more
    command = [sys.executable, "-m", "gemini_hpc.launch", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert (done.returncode, done.stdout.strip()) == (status, out) and err in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
