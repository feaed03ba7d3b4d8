"""A script that goes by SLURM_PROCID: after a recovery its ranks sit on other nodes than before."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training import Training
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = """#!/bin/bash
#SBATCH -N3 --ntasks-per-node=1 --requeue --open-mode=append
here=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
export MASTER_ADDR="$here" MASTER_PORT=29123
exec gemini-hpc run -- srun env -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE \\
    bash -c 'RANK=$SLURM_PROCID exec /opt/gemini-hpc/venv/bin/python DIR/train_gpt.py ARGS'
"""


def test_ranks_move_and_protection_goes_on(cluster: Cluster, train: Callable[..., Training]) -> None:
    """The batch host is cut, so every rank moves; then a second node is cut, which only a new seal can survive."""
    directory = cluster.locate_home("alice") / f"procid-{time.time_ns()}"
    shutil.copytree(EXAMPLES, directory, ignore=shutil.ignore_patterns("__pycache__"))
    arguments = f"--steps 40 --layers 2 --dim 96 --iteration-s 0.15 --log {directory}/loss.jsonl"
    (directory / "job.sh").write_text(SCRIPT.replace("DIR", str(directory)).replace("ARGS", arguments))
    for path in [directory, *directory.iterdir()]:
        path.chmod(0o755)
    shutil.chown(directory, 5001)
    fixed = [f"--chdir={directory}", f"--output={directory}/out", "--gemini-replicas=2", str(directory / "job.sh")]
    job = Training(cluster, cluster.submit_job(fixed), directory)
    job.reach(10)
    cluster.cut_power(job.hosts()[0])
    job.wait("recovery", lambda: any(line["restart"] == 1 for line in job.steps()), 60)
    resumed = min(line["step"] for line in job.steps() if line["restart"] == 1)
    job.reach(resumed + 8)

    def sealed_anew() -> bool:
        shown = json.loads(cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice").stdout)
        (only,) = shown["trainings"]
        return bool(only["state"] == "protected" and only["sealed"][0] == shown["epoch"])

    until(sealed_anew, 20, what="a seal of the new epoch")
    cluster.cut_power(job.hosts()[1])
    job.finish()
    assert job.repeated() <= 2 and job.output().count("resumed at version") == 2, job.output()
    assert set(job.losses()) == set(range(1, 41))
