"""A link that is cut: until Slurm ends the job, the other ranks wait for copies no longer than they may."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training import Training

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

ALONE = Path(__file__).with_name("alone.py")
PYTHON = "/opt/gemini-hpc/venv/bin/python"
STEPS = 400
MOST_S = 2.0  # 1.5 s, a step, and what a busy machine adds


def test_a_cut_link_is_not_waited_for(train: Callable[..., Training], cluster: Cluster) -> None:
    directory = cluster.locate_home("alice") / f"alone-{time.time_ns()}"
    directory.mkdir()
    shutil.copy(ALONE, directory / "alone.py")
    script = directory / "job.sh"
    script.write_text(f"#!/bin/bash\nexec gemini-hpc run -- srun {PYTHON} alone.py {directory}/loss.jsonl {STEPS}\n")
    for path in (directory, *directory.iterdir()):
        path.chmod(0o755)
        shutil.chown(path, 5001)
    options = ["--requeue", "--open-mode=append", "-N3", "--ntasks-per-node=1", "--gemini-replicas=2"]
    job = Training(
        cluster,
        cluster.submit_job([*options, f"--chdir={directory}", f"--output={directory}/out", str(script)]),
        directory,
    )
    job.reach(60)
    zombie = job.hosts()[1]
    cut_at = time.time()
    cluster.exec(zombie, ["ip", "link", "set", "eth0", "down"])
    try:
        job.finish()
    finally:
        cluster.exec(zombie, ["ip", "link", "set", "eth0", "up"])
    after = [line for line in job.steps() if line["restart"] == 0 and line["rank"] != 1 and line["at"] > cut_at]
    # Whoever made no further step knew of the loss before the next one, and waited for Slurm.
    for rank in {0, 2} - {line["rank"] for line in after}:
        assert f"rank {rank}: 1 of the job's nodes is dead" in job.output(), job.output()
    assert all(line["seconds"] < MOST_S for line in after), after
    assert job.cluster.read_job(job.id)["Restarts"] == "1" and "resumed at version" in job.output(), job.output()
