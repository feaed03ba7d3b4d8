"""Nodes that live and do harm, in real jobs: their ranks fail first, again and again."""

from __future__ import annotations

import re
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

pytestmark = pytest.mark.cluster

Lite = Any
LAUNCH = "python -m gemini_hpc.launch"


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
    assert events["sick"]["detail"].rpartition(": ")[2].startswith("the job moves off "), events["sick"]
    wait_for(job, 3)
    pids = {x["node_rank"]: str(x["pid"]) for x in begun(job, 3)}
    assert sorted(pids) == [0, 1, 2], job.story()
    assert job.cluster.exec(spare, ["kill", "-0", pids[1]]).returncode == 0, job.story()
    job.finish(60)
    assert job.slurm()["Restarts"] == "0" and job.state == "COMPLETED", job.story()
    assert reason(job, node).startswith("up"), reason(job, node)
