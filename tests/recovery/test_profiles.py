"""The main job on a cluster as sites run them: Slurm's default timers, accounting limits, munged on each node."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from harness import LiteJob
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

# All but this is the product's own default: a budget for one test after the other, agents gone at their end.
SETTINGS = {"retention_s": 20.0, "fence_budget_nodes": 1000}


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with Shared("site", nodes=6, profile="site", settings=SETTINGS) as shared:
        yield shared


def cut_and_finish(job: LiteJob, victim: int) -> None:
    job.reach(10)
    hosts = job.hosts()
    dead = hosts.pop(victim)
    before = {line["rank"]: line["node_rank"] for line in job.lines("resumed", 0)}
    job.cluster.power_off(dead)
    job.finish(120)
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert set(hosts) < set(job.hosts()), "survivors keep their part"
    assert {line["rank"]: line["node_rank"] for line in job.lines("resumed", 1)} == before


def test_recovery_on_site(cluster: Cluster) -> None:
    job = LiteJob(cluster).submit()
    cut_and_finish(job, 1)
    after = job.slurm()
    assert (after["Account"], after["QOS"], after["Partition"]) == ("lab", "normal", "batch")


@pytest.mark.long
def test_batch_host_cut_on_site(cluster: Cluster) -> None:
    """In the second partition, with another QOS: survivors and replacement are looked for there."""
    job = LiteJob(cluster, options=("--partition=debug", "--qos=urgent")).submit()
    cut_and_finish(job, 0)
    assert job.slurm()["Partition"] == "debug"


def test_a_job_that_waits_for_a_limit_holds_nothing(cluster: Cluster) -> None:
    """The user's next job takes the place under the limit while ours is on its way back."""
    job = LiteJob(cluster, nodes=2, options=("--qos=single",)).submit()
    job.reach(10)
    rival = cluster.sbatch(["--qos=single", "-N1"], script="#!/bin/sh\nsleep 600\n")
    until(lambda: "QOSMaxJobs" in cluster.job(rival)["Reason"], what="the next waits for the limit")
    cluster.power_off(job.hosts()[1])
    until(lambda: cluster.job(rival)["JobState"] == "RUNNING", 60, what="the next has its place")
    until(lambda: job.slurm()["Reason"] == "QOSMaxJobsPerUserLimit", 30, what="ours waits for the limit")

    def held() -> bool:
        return "ReservationName" in cluster.run(["scontrol", "show", "reservation", "-o"]).stdout

    until(lambda: not held(), 10, what="nothing held")
    assert any(event["name"] == "let_go" for event in job.events())
    assert job.state == "PENDING"
    cluster.run(["scancel", str(rival)])
    job.finish(120)
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()


def test_survivors_hold_their_place_without_a_controller_on_site(cluster: Cluster) -> None:
    """The epilog's Slurm commands find their configuration on a node that has no files of it."""
    cluster.controller_stop()
    job = LiteJob(cluster).submit()
    job.reach(10)
    hosts = job.hosts()
    cluster.power_off(hosts[1])
    until(lambda: "detected" in job.agent_log(hosts[0]), 20, what="the agents know")
    # As Slurm itself would after SlurmdTimeout.
    cluster.run(["scontrol", "update", f"nodename={hosts[1]}", "state=down", "reason=test"])
    began = time.monotonic()
    until(lambda: "gemini_" in job.slurm().get("Reservation", ""), 30, what="reserved")
    job.finish(120)
    assert {hosts[0], hosts[2]} < set(job.hosts())
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert time.monotonic() - began < 60, "not the 120 s of cred_expire"
