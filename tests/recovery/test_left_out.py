"""A survivor that Slurm would not allocate: the job goes to other nodes at once, and pulls what that one holds."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import LiteJob

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any


def names(job: LiteJob) -> list[tuple[str, str]]:
    return [(e["name"], e["host"]) for e in job.events()]


def test_drained_survivor(lite: Lite, cluster: Cluster) -> None:
    """Two groups of two. The other node of its group is the one that dies, so nobody else has its shards."""
    job = lite(nodes=4)
    job.reach(10)
    hosts = job.hosts()
    dead, drained = hosts[:2]
    cluster.run(["scontrol", "update", f"nodename={drained}", "state=drain", "reason=fan"])
    cut = time.time()
    cluster.cut_power(dead)
    job.finish()
    back = min(line["t"] for line in job.lines("resumed", 1)) - cut
    print(f"resumed {back:.1f} s after the cut")
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert not {drained, dead} & set(job.hosts()) and {hosts[3]} <= set(job.hosts())
    assert ("survivor_left_out", drained) in names(job) and ("unpinned", "") not in names(job), job.story()
    assert back < 60, "pinned to what it cannot get it would wait for two minutes"
    cluster.run(["scontrol", "update", f"nodename={drained}", "state=resume"])


def test_survivor_in_somebody_elses_reservation(lite: Lite, cluster: Cluster) -> None:
    job = lite(nodes=4)
    job.reach(10)
    hosts = job.hosts()
    make = ["scontrol", "create", "reservation", "ReservationName=theirs", f"Nodes={hosts[1]}", "Users=bob"]
    made = cluster.run([*make, "StartTime=now", "Duration=30", "Flags=IGNORE_JOBS"])
    assert made.returncode == 0, made.stderr
    try:
        cluster.cut_power(hosts[0])
        job.finish()
        assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
        assert not {hosts[0], hosts[1]} & set(job.hosts())
        assert ("survivor_left_out", hosts[1]) in names(job), job.story()
    finally:
        cluster.run(["scontrol", "delete", "ReservationName=theirs"])
