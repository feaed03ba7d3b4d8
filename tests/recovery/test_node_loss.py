"""Nodes lose their power in mid-training: the job comes back from its peers' memory."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

from gemini_hpc.devcluster import slurm
from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any


def cut_and_finish(job: LiteJob, *nodes: str, reset: bool = False) -> None:
    for node in nodes:
        job.cluster.cut_power(node, reset=reset)
    job.finish()
    assert job.repeated(1) in (0, 1), job.story()
    assert job.resumed(1) > 0, job.story()
    assert not set(nodes) & set(job.hosts())


def test_node_cut_with_reset(lite: Lite) -> None:
    """The survivors see its connections closed."""
    job = lite()
    job.reach(10)
    before = {line["rank"]: line["node_rank"] for line in job.lines("resumed", 0)}
    survivors = [job.hosts()[0], job.hosts()[2]]
    cut_and_finish(job, job.hosts()[1], reset=True)
    assert set(survivors) < set(job.hosts()), "survivors keep their part"
    assert {line["rank"]: line["node_rank"] for line in job.lines("resumed", 1)} == before


@pytest.mark.witness("the node that runs the batch script dies: survivors requeue the job")
def test_batch_host_cut(lite: Lite) -> None:
    job = lite()
    job.reach(10)
    cut_and_finish(job, job.hosts()[0])


def test_two_nodes_of_a_group_of_five(lite: Lite) -> None:
    job = lite(nodes=5, replicas=3)
    job.reach(8)
    cut_and_finish(job, *job.hosts()[3:])


@pytest.mark.witness("a whole group dies: the job begins anew and says which shards are lost")
def test_whole_group_lost(lite: Lite) -> None:
    job = lite(nodes=4)
    job.reach(8)
    hosts = job.hosts()
    for node in hosts[2:]:
        job.cluster.cut_power(node)
    job.finish()
    assert job.resumed(1) == 0
    reasons = " ".join(line["reason"] for line in job.lines("lost"))
    assert "shard 2" in reasons and "shard 3" in reasons, reasons
    assert hosts[2] in reasons and hosts[3] in reasons, reasons


def test_two_nodes_of_a_group_of_three(lite: Lite) -> None:
    """Three copies: the third node has everything."""
    job = lite(nodes=3, replicas=3)
    job.reach(8)
    for node in job.hosts()[1:]:
        job.cluster.cut_power(node)
    job.finish()
    assert job.resumed(1) >= 8 and job.repeated(1) in (0, 1), job.story()


def test_second_cut_during_recovery(lite: Lite) -> None:
    job = lite(nodes=4)
    job.reach(10)
    hosts = job.hosts()
    job.cluster.cut_power(hosts[1])
    until(lambda: job.state in ("PENDING", "COMPLETING", "REQUEUED"), what="requeued")
    job.cluster.cut_power(hosts[3])
    job.finish(120)
    last = max(line["restart"] for line in job.lines("resumed"))
    assert job.resumed(last) > 0 and job.repeated(last) in (0, 1), job.story()


@pytest.mark.witness("a node that reboots at once has lost its memory, and the job recovers")
def test_node_that_reboots_within_a_second(lite: Lite) -> None:
    job = lite()
    job.reach(10)
    node = job.hosts()[1]
    job.cluster.cut_power(node)
    job.cluster.restore_power(node)
    job.finish(120)
    last = max(line["restart"] for line in job.lines("resumed"))
    assert last >= 1 and job.resumed(last) > 0 and job.repeated(last) in (0, 1), job.story()


def test_a_node_that_boots_again_serves_its_job(lite: Lite, cluster: Cluster) -> None:
    """The job waits for it. slurmctld no longer ends the job there, so slurmd would know it, and run no prolog."""
    job = lite()
    job.reach(10)
    node = job.hosts()[1]
    for other in set(cluster.node_names) - set(job.hosts()):
        cluster.run(["scontrol", "update", f"NodeName={other}", "State=DRAIN", "Reason=test"])
    cluster.cut_power(node)
    until(lambda: job.state == "PENDING", 60, what="requeued")
    time.sleep(40)
    cluster.restore_power(node)
    time.sleep(3)  # before 23.11 slurmd runs no prolog of a job that comes back within 2 s of its end on the node
    cluster.resume(node)
    job.finish()
    assert node in job.hosts()
    assert job.resumed(1) >= 10 and job.repeated(1) in (0, 1), job.story()


def test_survivors_on_which_slurm_skips_the_prolog(lite: Lite, cluster: Cluster) -> None:
    """slurmd runs no prolog for a job id that it still remembers, and it forgets at most every 2 s: whenever
    another job starts a step on a shared survivor just before. A busy machine may start bob's steps too seldom. The
    slurmd of newer releases forgets at once, and runs it."""
    remembers = slurm.read_release() < (23, 11)
    script = cluster.locate_home("bob") / "steps.sh"
    script.write_text("#!/bin/bash\nwhile :; do srun -n1 true; sleep 0.05; done\n")
    script.chmod(0o755)
    for _ in range(4):
        job = lite()
        job.reach(10)
        hosts = job.hosts()
        for node in (hosts[0], hosts[2]) * 2:
            cluster.submit_job(["-N1", "-n1", "-w", node, str(script)], user="bob")
        until(lambda: cluster.run(["squeue", "-h", "-t", "R", "-u", "bob"]).stdout.count("\n") == 4, what="bob runs")
        cluster.cut_power(hosts[1])
        job.finish()
        assert {hosts[0], hosts[2]} < set(job.hosts())
        assert job.repeated(1) in (0, 1) and job.resumed(1) > 0, job.story()
        summoned = any(e["name"] == "summoned" for e in job.events())
        assert remembers or not summoned, job.story()
        if summoned or not remembers:
            return
        cluster.run(["scancel", "--user=bob"])
        cluster.restore()
    raise AssertionError("the prolog was never skipped")


def test_controller_stopped(lite: Lite, cluster: Cluster) -> None:
    cluster.stop_controller()
    job = lite()
    job.reach(10)
    cut_and_finish(job, job.hosts()[1])


@pytest.mark.witness("on a busy cluster the survivors are held for the job")
def test_busy_cluster_keeps_the_survivors_for_us(lite: Lite, cluster: Cluster) -> None:
    job = lite(options=("--nice=10000",))  # so that the rivals come before it
    job.reach(10)
    hosts = job.hosts()
    script = cluster.locate_home("bob") / "rival.sh"
    script.write_text("#!/bin/bash\nsleep 6\n")
    script.chmod(0o755)
    for _ in range(12):
        cluster.submit_job(["--exclusive", "-N1", str(script)], user="bob")
    until(lambda: "bob" in cluster.run(["squeue", "-h", "-t", "R", "-o", "%u"]).stdout, what="rivals run")
    cluster.cut_power(hosts[1])
    job.finish(120)
    assert job.repeated(1) in (0, 1) and job.resumed(1) > 0, job.story()
    assert {hosts[0], hosts[2]} < set(job.hosts()), job.story()
