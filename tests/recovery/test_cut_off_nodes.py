"""Requirement cut-off-nodes: a node that has lost all peers *and* the controller ends its ranks; one that has either
of them never does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from harness import LiteJob
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

FENCE_S, LONGER_S = 2.0, 4.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """A cluster where self_fence_s is short."""
    settings = {"retention_s": 20.0, "fence_budget_nodes": 1000, "self_fence_s": FENCE_S}
    with Shared("cutoff", nodes=5, settings=settings) as shared:
        yield shared


def trainers(job: LiteJob, node: str) -> list[str]:
    """Ranks, and not the srun that has the same words behind its name."""
    return job.cluster.exec(node, ["pgrep", "-f", f"^[^ ]*python[^ ]* {job.directory}/lite[.]py"]).stdout.split()


def agents(job: LiteJob, nodes: list[str], number: int) -> None:
    for node in nodes:
        job.cluster.exec(node, ["kill", f"-{number}", str(job.agent_pid(node))])


def fenced(job: LiteJob, node: str) -> bool:
    return "event=self_fenced" in job.agent_log(node)


def test_only_with_neither_peer_nor_controller(cluster: Cluster) -> None:
    """The same node in each of the states; only the last one ends its ranks. And a job of one node beside it."""
    job = LiteJob(cluster, nodes=3, steps=1_000_000, pause_s=0.05).submit()
    single = LiteJob(cluster, nodes=1, replicas=1, steps=1_000_000, pause_s=0.05).submit()
    job.reach(5)
    single.reach(5)
    first, second, third = job.hosts()
    (lone,) = single.hosts()

    def still_there(state: str) -> None:
        deadline = time.monotonic() + LONGER_S
        while time.monotonic() < deadline:
            assert trainers(job, first), f"ended with {state}\n{job.story()}"
            assert trainers(single, lone), f"a job of one node was ended with {state}\n{single.story()}"
            time.sleep(0.5)
        assert not fenced(job, first) and not fenced(single, lone), state

    def lost(node: str) -> None:
        until(lambda: f"{node} is silent" in job.agent_log(first), 20, what=f"{node} is missed")

    cluster.stop_controller()
    still_there("all peers, no controller")
    agents(job, [second], signal.SIGSTOP)
    lost(second)
    still_there("one peer, no controller")
    cluster.start_controller()
    agents(job, [third], signal.SIGSTOP)
    lost(third)
    still_there("no peer, the controller")
    cluster.stop_controller()
    try:
        until(lambda: not trainers(job, first), 20, what="its ranks are ended")
    except AssertionError as exc:
        raise AssertionError(f"{exc}\n{job.story()}") from None
    finally:
        agents(job, [second, third], signal.SIGCONT)
    assert fenced(job, first)
    assert trainers(single, lone) and not fenced(single, lone), "a job of one node is never cut off from itself"
    cluster.start_controller()


def test_node_cut_off_for_good_ends_its_ranks(cluster: Cluster) -> None:
    """Cut off, not dead: the job goes on elsewhere, and here its ranks are ended. Nothing else on the node is."""
    cluster.run(["scancel", "--user=alice"])
    until(lambda: not cluster.run(["squeue", "-h", "-u", "alice"]).stdout.strip(), 60, 0.1, what="queue empty")
    job = LiteJob(cluster, nodes=3).submit()
    job.reach(10)
    zombie = job.hosts()[1]
    beside = cluster.start_command(["sleep", "600"], user="alice", node=zombie)
    cluster.exec(zombie, ["ip", "link", "set", "eth0", "down"])
    try:
        assert trainers(job, zombie)
        until(lambda: not trainers(job, zombie), 40, what="its ranks are ended")
        assert fenced(job, zombie)
        job.finish()
        assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
        assert beside.poll() is None, "a process of the same user that is not of this training"
    finally:
        beside.kill()
        cluster.exec(zombie, ["ip", "link", "set", "eth0", "up"])
