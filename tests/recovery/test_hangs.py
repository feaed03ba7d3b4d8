"""A training of which one rank hangs, as a job: found by the agents, and begun again in the same allocation."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

PROGRAM = Path(__file__).parents[1] / "train" / "hanging.py"
HANG_S, STEPS, AT = 5, 60, 40
LONGER_S = 3 * HANG_S
LAUNCH = "srun python -m gemini_hpc.launch"


class Job:
    """Three ranks of alice's that run hanging.py."""

    def __init__(self, cluster: Cluster, run: str, how: str) -> None:
        self.cluster = cluster
        self.directory = cluster.locate_home("alice") / f"hangs-{time.time_ns()}"
        self.directory.mkdir()
        shutil.chown(self.directory, 5001)
        script = self.directory / "job.sh"
        shutil.copy(PROGRAM, self.directory)
        (self.directory / PROGRAM.name).chmod(0o644)
        script.write_text(
            f"#!/bin/bash\nexport OMP_NUM_THREADS=1\nexec {run} {self.directory}/{PROGRAM.name} {STEPS} {AT} {how}\n"
        )
        script.chmod(0o755)
        options = ["--requeue", f"--output={self.directory}/out", "-N3", "--ntasks-per-node=1", "--gemini-replicas=2"]
        self.id = cluster.submit_job([*options, f"--gemini-hang={HANG_S}", str(script)])

    def output(self) -> str:
        path = self.directory / "out"
        return path.read_text() if path.exists() else ""

    @property
    def state(self) -> str:
        return self.cluster.read_job(self.id).get("JobState", "gone")

    def inspect(self) -> Any:
        done = self.cluster.run(["gemini-hpc", "inspect", str(self.id), "--json"], user="alice")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def hung(self) -> list[dict[str, Any]]:
        return [event for event in self.inspect()["events"] if event["name"] == "hung"]

    def finish(self) -> None:
        try:
            until(lambda: self.state == "COMPLETED", 150, 0.2, what=f"job {self.id} completes")
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {self.state}\n{self.output()[-6000:]}") from None
        assert self.cluster.read_job(self.id)["Restarts"] == "0"
        assert self.output().count(" result ") == 3


def test_one_rank_sleeps_for_ever(cluster: Cluster) -> None:
    job = Job(cluster, LAUNCH, "sleep")
    job.finish()
    [event] = job.hung()
    assert event["version"] == AT - 1 and event["detail"].startswith("rank 1: no progress for "), event
    assert "forgotten (hanging.py:" in event["detail"], event
    assert event["detail"].endswith(f"; /run/gemini-hpc/{job.id}/hung-0"), event
    begins = [int(version) for version in re.findall(r" begins at (\d+);", job.output())]
    assert sorted(begins) == [0] * 3 + [AT - 1] * 3, job.output()


def test_without_anybody_to_start_it_again(cluster: Cluster) -> None:
    job = Job(cluster, "srun python", "sleep")
    until(lambda: " begins at " in job.output(), 90, 0.2, what="training")
    until(job.hung, 90, 0.5, what="hung")
    found = job.inspect()
    assert found["state"] == "stalled", found["state"]
    assert ": rank 1: no progress for " in found["trainings"][0]["stalled"]["hung"]
    text = cluster.run(["gemini-hpc", "inspect", str(job.id)], user="alice").stdout
    assert "hangs: " in text and job.state == "RUNNING", text


def test_a_suspended_job(cluster: Cluster) -> None:
    job = Job(cluster, LAUNCH, "pause")
    until(lambda: job.output().count(" begins at ") == 3, 90, 0.1, what="training")
    assert cluster.run(["scontrol", "suspend", str(job.id)]).returncode == 0
    until(lambda: job.state == "SUSPENDED", 20, what="suspended")
    time.sleep(LONGER_S)
    assert cluster.run(["scontrol", "resume", str(job.id)]).returncode == 0
    job.finish()
    assert not job.hung() and job.output().count(" begins at ") == 3
