"""However a job ends, its memory is given back; the fixture's leak check after each test is part of the test."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from harness import LiteJob, given_back, leaks
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any


@pytest.mark.witness("a job that completes leaves nothing behind")
def test_finished(lite: Lite, cluster: Cluster) -> None:
    """And where nothing is wrong its user is told nothing."""
    job = lite(steps=10)
    job.finish()
    given_back(cluster, 5)
    assert not job.lines("notice"), job.story()


@pytest.mark.witness("a job that is cancelled leaves nothing behind")
def test_cancelled_while_running(lite: Lite, cluster: Cluster) -> None:
    job = lite()
    job.reach(5)
    cluster.run(["scancel", str(job.id)])
    given_back(cluster)


def test_failed(cluster: Cluster) -> None:
    """Kept for a post-mortem restart until the retention time is over, or the user says that it is not wanted."""
    job = LiteJob(cluster).submit()
    job.reach(5)
    cluster.exec(job.hosts()[0], ["pkill", "-KILL", "-f", "lite[.]py"])
    until(lambda: job.state in ("FAILED", "COMPLETED"), 30, what="job over")
    given_back(cluster, 60)


def test_cancelled_while_pending_after_a_requeue(lite: Lite, cluster: Cluster) -> None:
    job = lite()
    job.reach(5)
    cluster.run(["scontrol", "requeuehold", str(job.id)])
    until(lambda: job.state == "PENDING", 30, what="pending")
    assert leaks(cluster), "replicas outlive the requeue"
    cluster.run(["scancel", str(job.id)])
    given_back(cluster)


def test_requeued_elsewhere(lite: Lite, cluster: Cluster) -> None:
    """The old nodes are drained by hand: the job restarts on others, pulls from the old ones, and they let go."""
    job = lite()
    job.reach(5)
    old = job.hosts()[1:]
    for node in old:
        cluster.run(["scontrol", "update", f"nodename={node}", "state=drain", "reason=test"])
    cluster.run(["scontrol", "requeue", str(job.id)])
    job.reach(1, "resumed", 60, 1)
    assert not set(old) & set(job.hosts())
    until(lambda: not any(job.agent_pid(n) for n in old), 60, 0.5, what="old agents gone")
    cluster.run(["scancel", str(job.id)])
    given_back(cluster)


def test_requeued_where_no_node_remembers(lite: Lite, cluster: Cluster) -> None:
    """All nodes are other ones. Only the controller can say where the replicas are, and it is there a second after
    the new agents: they wait for it, or the state is lost."""
    job = lite(nodes=2)
    job.reach(5)
    old = job.hosts()
    cluster.run(["scontrol", "update", f"nodename={','.join(old)}", "state=drain", "reason=test"])
    cluster.run(["scontrol", "requeue", str(job.id)])
    until(lambda: job.state == "PENDING", 30, what="on its way back")
    cluster.stop_controller(signal.SIGKILL)
    others = [node for node in cluster.node_names if node not in old]
    until(lambda: sum(bool(job.agent_pid(n)) for n in others) == 2, 30, what="the new agents")
    time.sleep(1)
    cluster.start_controller()
    job.finish()
    assert not set(old) & set(job.hosts())
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()


def test_owner_requeue_resumes_from_memory(lite: Lite, cluster: Cluster) -> None:
    job = lite()
    job.reach(10)
    cluster.run(["scontrol", "requeue", str(job.id)], user="alice")
    job.finish()
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
