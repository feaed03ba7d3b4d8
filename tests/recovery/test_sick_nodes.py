"""Nodes that live and do harm, in real jobs: their ranks fail first, again and again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any
LAUNCH = "python -m gemini_hpc.launch"


@pytest.fixture(autouse=True)
def resumed(cluster: Cluster) -> Iterator[None]:
    """What a test has drained serves the next one."""
    yield
    for node in range(1, 8):
        if "DRAIN" in cluster.run(["scontrol", "show", "node", f"n{node}"]).stdout:
            cluster.run(["scontrol", "update", f"nodename=n{node}", "state=resume"])


def kill_rank(job: LiteJob, node: str) -> None:
    """SIGKILL to what trains there now."""
    place = job.hosts().index(node)
    newest = max((x for x in job.lines("resumed") if x["node_rank"] == place), key=lambda x: x["t"])
    done = job.cluster.exec(node, ["kill", "-9", str(newest["pid"])])
    assert done.returncode == 0, f"{done.stderr}\n{job.story()}"


def begun(job: LiteJob, attempt: int) -> list[dict[str, Any]]:
    return [x for x in job.lines("resumed") if x["step"] == f"{job.id}.0+{attempt}"]


def wait_for(job: LiteJob, attempt: int) -> None:
    until(lambda: len(begun(job, attempt)) == job.nodes, 30, what=f"attempt {attempt}\n{job.story()}")
    again = begun(job, attempt)
    assert len({x["version"] for x in again}) == 1, job.story()
    assert job.completed(min(x["t"] for x in again)) - again[0]["version"] in (0, 1), job.story()
    job.reach(again[0]["version"] + 5)


def reason(job: LiteJob, node: str) -> str:
    text = job.cluster.run(["scontrol", "show", "node", node]).stdout
    found = re.search(r"Reason=(.*)", text)
    return f"{'DRAIN' if 'DRAIN' in text else 'up'} {found[1] if found else ''}"


def test_a_node_whose_rank_failed_first_twice_is_left(lite: Lite) -> None:
    job: LiteJob = lite(run="srun", python=LAUNCH, options=("-N4", "--no-kill", "--gemini-spares=1"))
    job.reach(10)
    node, spare = job.hosts()[1], job.hosts()[3]
    kill_rank(job, node)
    wait_for(job, 1)
    assert "sick" not in [e["name"] for e in job.events()], job.story()
    kill_rank(job, node)
    until(lambda: "without" in [e["name"] for e in job.events()], 10, what=f"left\n{job.story()}")
    until(lambda: len(begun(job, 3)) == job.nodes, 30, what=f"with the spare\n{job.story()}")
    events = {e["name"]: e for e in job.events()}
    assert f"rank 1 on {node} was killed or crashed" in events["sick"]["detail"], events["sick"]
    assert events["sick"]["detail"].endswith(": left") and "the job has gone on" in events["not_drained"]["detail"]
    wait_for(job, 3)
    pids = {x["node_rank"]: str(x["pid"]) for x in begun(job, 3)}
    assert sorted(pids) == [0, 1, 2], job.story()
    assert job.cluster.exec(spare, ["kill", "-0", pids[1]]).returncode == 0, job.story()
    job.finish(60)
    assert job.slurm()["Restarts"] == "0" and job.state == "COMPLETED", job.story()
    assert reason(job, node).startswith("up"), reason(job, node)


def test_without_a_spare_the_node_is_drained_and_the_job_goes_on(lite: Lite) -> None:
    job: LiteJob = lite(run="srun", python=LAUNCH)
    job.reach(10)
    node = job.hosts()[2]
    for attempt in (1, 2):
        kill_rank(job, node)
        wait_for(job, attempt)
    until(lambda: reason(job, node).startswith("DRAIN"), 10, what=f"drained\n{job.story()}")
    assert f"gemini-hpc: sick, job {job.id} restart 0: rank 2 on {node} was killed" in reason(job, node)
    assert [e["host"] for e in job.events() if e["name"] == "drained"] == [node], job.events()
    shown = job.cluster.run(["gemini-hpc", "inspect", str(job.id)], user="alice").stdout
    assert f"{node} did harm before, " in shown, shown
    job.finish(60)
    assert job.slurm()["Restarts"] == "0" and job.state == "COMPLETED", job.story()


def test_ranks_of_several_nodes_in_turn_are_no_nodes_fault(lite: Lite) -> None:
    job: LiteJob = lite(run="srun", python=LAUNCH)
    job.reach(10)
    hosts = job.hosts()
    for attempt, node in enumerate(hosts[1:], 1):
        kill_rank(job, node)
        wait_for(job, attempt)
    assert [e["name"] for e in job.events() if e["name"] in ("failed_first", "sick", "drained")] == [
        "failed_first"
    ] * 2
    job.finish(60)
    assert all(reason(job, node).startswith("up") for node in hosts), job.story()
