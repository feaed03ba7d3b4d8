"""The main job on a cluster as sites run them: Slurm's default timers, accounting limits, munged on each node, and
jobs that the kernel holds to their memory."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from harness import LiteJob
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster import cgroups
from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

# All but this is the product's own default: a budget for one test after the other, agents gone at their end.
SETTINGS = {"retention_s": 20.0, "fence_budget_nodes": 1000}
MEMORY_MB = 200
LACKING = f"out of memory: the limit here is {MEMORY_MB} MiB"


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with Shared("site", nodes=6, profile="site", settings=SETTINGS) as shared:
        yield shared


@pytest.fixture
def limited(cluster: Cluster) -> Cluster:
    """A cluster on which the kernel holds jobs to their memory."""
    if why := cgroups.find_tracking_problem():
        pytest.skip(f"`up` says so: {why}")
    return cluster


def cut_and_finish(job: LiteJob, victim: int) -> None:
    job.reach(10)
    hosts = job.hosts()
    dead = hosts.pop(victim)
    before = {line["rank"]: line["node_rank"] for line in job.lines("resumed", 0)}
    job.cluster.cut_power(dead)
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
    rival = cluster.submit_job(["--qos=single", "-N1"], script="#!/bin/sh\nsleep 600\n")
    until(lambda: "QOSMaxJobs" in cluster.read_job(rival)["Reason"], what="the next waits for the limit")
    cluster.cut_power(job.hosts()[1])
    until(lambda: cluster.read_job(rival)["JobState"] == "RUNNING", 60, what="the next has its place")
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
    cluster.stop_controller()
    job = LiteJob(cluster).submit()
    job.reach(10)
    hosts = job.hosts()
    cluster.cut_power(hosts[1])
    until(lambda: "detected" in job.agent_log(hosts[0]), 20, what="the agents know")
    # As Slurm itself would after SlurmdTimeout.
    cluster.run(["scontrol", "update", f"nodename={hosts[1]}", "state=down", "reason=test"])
    began = time.monotonic()
    until(lambda: "gemini_" in job.slurm().get("Reservation", ""), 30, what="reserved")
    job.finish(120)
    assert {hosts[0], hosts[2]} < set(job.hosts())
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert time.monotonic() - began < 60, "not the 120 s of cred_expire"


def test_a_rank_that_takes_more_than_its_job_has_is_started_once_more(limited: Cluster) -> None:
    """Without launchers, at the same step each time."""
    run = "env LITE_TAKES=8 gemini-hpc run -- srun --kill-on-bad-exit=1"
    job = LiteJob(limited, nodes=2, run=run, options=(f"--mem={MEMORY_MB}",)).submit()
    until(lambda: "\nstep ended with" in job.output(), 120, what=f"the end\n{job.story()}")
    ends = re.findall(r"run: the step ended with status \d+ \((.*)\)(.*)", job.output())
    assert ends == [
        (f"rank 1 was ended: {LACKING}", " on healthy nodes: restart 1 of 3"),
        (f"rank 1 was ended: {LACKING}", "; not restarted: it fails at step 8 each time"),
    ], job.story()
    assert {line["restart"] for line in job.lines("resumed")} == {0}, job.story()
    assert not job.refused(), job.story()


def test_a_leak_is_started_three_times_and_is_no_nodes_fault(limited: Cluster) -> None:
    """Under launchers, at another step each time, and with newer versions between."""
    job = LiteJob(
        limited,
        run="gemini-hpc run -- srun --kill-on-bad-exit=1",
        python="python -m gemini_hpc.launch",
        options=(f"--mem={MEMORY_MB}",),
    ).submit()
    said = f"launch: rank 1 ended with SIGKILL ({LACKING}); "
    for attempt in range(4):
        job.reach(5 * (attempt + 1))
        rank = max((line for line in job.lines("resumed") if line["rank"] == 1), key=lambda line: line["t"])
        assert limited.exec(rank["node"], ["kill", "-USR2", str(rank["pid"])]).returncode == 0, job.story()
        until(lambda: job.output().count(said) > attempt, 60, what=f"it is told\n{job.story()}")  # noqa: B023
    until(lambda: "\nstep ended with" in job.output(), 90, what=f"the end\n{job.story()}")
    ends = re.findall(rf"{re.escape(said)}(.*)", job.output())
    again = [f"starting all ranks again: restart {n} of 3" for n in (1, 2, 3)]
    assert ends == [*again, "not starting the ranks again: --max-restarts=3 is reached"], job.story()
    (given_up,) = re.findall(r"run: the step ended with status \d+; not restarted: (.*)", job.output())
    assert LACKING in given_up and given_up.endswith("--max-restarts=3 is reached"), given_up
    assert {line["restart"] for line in job.lines("resumed")} == {0}, job.story()
    judged = [event["detail"] for event in job.events() if event["name"] == "failed_first"]
    assert judged and all("does not count against the node" in detail for detail in judged), judged
    assert not job.refused(), job.story()
