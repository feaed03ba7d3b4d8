"""Nodes are cut off for some seconds, in a job with spares: nothing is lost, and nobody waits for anything later."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from harness import LiteJob
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

CUT_S = 5.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """Whose controller is even slower to call a node dead than at a site."""
    settings = {"retention_s": 20.0, "fence_confirm_s": 3 * CUT_S}
    with Shared("pair", nodes=6, settings=settings) as shared:
        yield shared


def cut_off(cluster: Cluster, first: int, last: int) -> LiteJob:
    """Cut these of a job's nodes off for a while, and let it end."""
    options = ("-N6", "--no-kill", "--gemini-spares=2")
    job = LiteJob(cluster, nodes=4, run="srun", python="python -m gemini_hpc.launch", options=options).submit()
    job.reach(10)
    hosts = job.hosts()[first:last]
    for host in hosts:
        cluster.exec(host, ["ip", "link", "set", "eth0", "down"])
    time.sleep(CUT_S)
    for host in hosts:
        cluster.exec(host, ["ip", "link", "set", "eth0", "up"])
    job.finish(120)
    return job


def test_nodes_that_alone_hold_something_are_waited_for(cluster: Cluster) -> None:
    job = cut_off(cluster, 2, 4)
    assert "waits" in [event["name"] for event in job.events()], job.story()
    assert job.slurm()["Restarts"] == "0" and job.state == "COMPLETED", job.story()
    assert all(line["version"] > 9 for line in job.lines("resumed") if "+" in line["step"]), job.story()


def test_a_training_has_finished_though_a_replaced_node_has_not(cluster: Cluster) -> None:
    """The node comes back, reports all others as dead, and has never heard how its rank's work ended elsewhere."""
    job = cut_off(cluster, 3, 4)
    assert "left_out" in [event["name"] for event in job.events()], job.story()
    record = cluster.directory / "controller" / "jobs" / f"{job.id}.job"
    until(lambda: not record.exists(), 40, what="the controller is done with the job")
    assert job.slurm()["Restarts"] == "0" and job.state == "COMPLETED", job.story()
    told = [event["detail"] for event in job.events() if event["name"] == "dismissed"]
    assert not [why for why in told if "not confirmed" in why], job.story()
