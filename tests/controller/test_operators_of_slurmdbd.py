"""Requirement who-may-inspect with a real slurmdbd: its Operators and Administrators may inspect every job."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from waiting import until

from gemini_hpc.devcluster import Cluster

PYTHON = "/opt/gemini-hpc/venv/bin/python"


def inspect(cluster: Cluster, job: int, user: str) -> Any:
    argv = [PYTHON, "-I", "-m", "gemini_hpc.cli.main", "inspect", str(job)]
    return cluster.run(argv, user=user)


@pytest.mark.cluster
def test_operators_of_a_real_slurmdbd() -> None:
    with Cluster.bring_up(f"dbd{os.getpid()}", nodes=1, profile="site") as cluster:
        job = cluster.submit_job(["-N1"], script="#!/bin/sh\nsleep 300\n")
        until(lambda: cluster.read_job(job)["JobState"] == "RUNNING", 30)
        for user, level in (("bob", "Operator"), ("games", "Administrator"), ("man", "None")):
            there = "sacctmgr", "-i", "modify" if user == "bob" else "add", "user", user
            words = ["set"] if user == "bob" else ["account=root"]
            done = cluster.run([*there, *words, f"adminlevel={level}"])
            assert done.returncode == 0, done
        for user in ("alice", "bob", "games"):
            done = inspect(cluster, job, user)
            assert done.returncode == 0 and "asked: agents" not in done.stdout, (user, done)
        for user in ("man", "nobody"):
            done = inspect(cluster, job, user)
            assert done.returncode == 1 and "unknown, or not yours" in done.stderr, (user, done)

        assert cluster.run(["sacctmgr", "-i", "modify", "user", "man", "set", "adminlevel=Operator"]).returncode == 0
        assert cluster.run(["pkill", "-STOP", "-x", "slurmdbd"]).returncode == 0
        try:
            began = time.monotonic()
            done = inspect(cluster, job, "daemon")
            assert done.returncode == 1 and time.monotonic() - began < 8.0, done
            assert inspect(cluster, job, "alice").returncode == 0, "the owner needs no slurmdbd"
        finally:
            cluster.run(["pkill", "-CONT", "-x", "slurmdbd"])
