"""A mistake in plugstack.conf on a real cluster: it costs protection, never a node."""

from __future__ import annotations

import os
import time

import pytest

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(
            "optional", marks=pytest.mark.witness("a mistake in plugstack.conf costs protection and no node")
        ),
        "required",
    ],
)
def test_a_job_runs_unprotected_and_its_node_stays(word: str) -> None:
    with Cluster.bring_up(f"spank{os.getpid()}", nodes=1, controller=False) as cluster:
        plugstack = cluster.directory / "etc" / "slurm" / "plugstack.conf"
        plugin = plugstack.read_text().split()[1]
        # Held: the mistake is for slurmd and slurmstepd; sbatch itself would refuse the line.
        job = cluster.submit_job(["--hold", "--requeue", "-N1"], script="#!/bin/sh\necho ran\n")
        plugstack.write_text(f"{word} {plugin} run_dir=not-absolute\n")
        cluster.run(["scontrol", "release", str(job)])
        deadline = time.monotonic() + 40.0
        while (record := cluster.read_job(job))["JobState"] != "COMPLETED":
            assert time.monotonic() < deadline, f"{record} on {cluster.read_node_states()}"
            time.sleep(0.1)
        # Slurm's complaint may stand before it.
        assert (cluster.locate_home("alice") / f"slurm-{job}.out").read_text().splitlines()[-1] == "ran"
        cluster.wait_idle(timeout_s=20.0)
        assert record["Restarts"] == "0"
        done = cluster.run(["sbatch", "-N1", "--wrap", "true"], user="alice")
        assert "wanted an absolute path" in done.stderr
        assert (done.returncode == 0) == (word == "optional")
        cluster.run(["scancel", "--user=alice"])
