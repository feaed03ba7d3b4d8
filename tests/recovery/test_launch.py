"""Launchers in a real job: a rank that dies costs an attempt and no step; a lost node costs a requeue, as ever."""

from __future__ import annotations

from typing import Any

import pytest
from harness import LiteJob
from waiting import until

pytestmark = pytest.mark.cluster

Lite = Any


def attempts(job: LiteJob, restart: int = 0) -> list[str]:
    """Names of the launches of one incarnation, in the order in which they began."""
    begun: dict[str, float] = {}
    for line in job.lines("resumed", restart):
        begun.setdefault(line["step"], line["t"])
    return sorted(begun, key=lambda step: begun[step])


def process(job: LiteJob, node_rank: int) -> str:
    """The newest process of a node's rank."""
    line = max((x for x in job.lines("resumed") if x["node_rank"] == node_rank), key=lambda x: x["t"])
    return str(line["pid"])


def wait_for(job: LiteJob, launch: str) -> None:
    """Until all ranks train in it; at most one step has been repeated for it."""
    until(lambda: launch in attempts(job), 30, what=f"{launch}\n{job.story()}")
    until(lambda: len([x for x in job.lines("resumed") if x["step"] == launch]) == job.nodes, 20, what=launch)
    again = [line for line in job.lines("resumed") if line["step"] == launch]
    start = min(line["t"] for line in again)
    version = again[0]["version"]
    assert all(line["version"] == version for line in again), job.story()
    assert job.completed(start) - version in (0, 1), job.story()
    job.reach(version + 5)


@pytest.mark.witness("launchers start a dead rank again, a dead launcher costs a step of Slurm's")
def test_a_rank_then_a_launcher_then_a_node(lite: Lite) -> None:
    job: LiteJob = lite(run="gemini-hpc run -- srun --kill-on-bad-exit=1", python="python -m gemini_hpc.launch")
    job.reach(10)
    node = job.hosts()[1]
    killed = job.cluster.exec(node, ["kill", "-9", process(job, 1)])
    assert killed.returncode == 0, killed.stderr
    wait_for(job, f"{job.id}.0+1")
    assert job.slurm()["Restarts"] == "0" and attempts(job) == [f"{job.id}.0", f"{job.id}.0+1"], job.story()
    events = [(e["name"], e["detail"]) for e in job.events() if e["name"] in ("rank_failed", "relaunch")]
    assert [name for name, _ in events] == ["rank_failed", "relaunch"], events
    assert all("rank 1 ended with SIGKILL" in detail for _, detail in events), events

    launcher = job.cluster.exec(node, ["ps", "-o", "ppid=", "-p", process(job, 1)]).stdout.strip()
    assert job.cluster.exec(node, ["kill", "-9", launcher]).returncode == 0
    wait_for(job, f"{job.id}.1")
    assert job.slurm()["Restarts"] == "0" and "on healthy nodes: restart 1 of 3" in job.output(), job.story()

    job.cluster.cut_power(node)
    job.finish()
    assert job.slurm()["Restarts"] == "1" and attempts(job, 1) == [f"{job.id}.0"], job.story()
    assert job.resumed(1) > 10 and job.repeated(1) in (0, 1), job.story()


def test_a_mistake_is_tried_once_more_by_launchers_and_run_together(lite: Lite) -> None:
    """Each of the two would try it twice."""
    run = "env LITE_FAILS=8 gemini-hpc run -- srun --kill-on-bad-exit=1"
    job: LiteJob = lite(run=run, python="python -m gemini_hpc.launch")
    until(lambda: "\nstep ended with 1" in job.output(), 60, what=f"the end\n{job.story()}")
    assert attempts(job) == [f"{job.id}.0", f"{job.id}.0+1"], job.story()
    said = job.output()
    again = "ended with status 1 (ZeroDivisionError at lite.py:"
    assert "starting all ranks again: restart 1 of 3" in said and again in said, said
    assert "run: the step ended with status 1; not restarted: rank " in said, said
    assert "fails at step 8 each time" in said and "on healthy nodes" not in said, said


def test_a_mistake_without_launchers_is_tried_once_more(lite: Lite) -> None:
    job: LiteJob = lite(run="env LITE_FAILS=8 gemini-hpc run -- srun")
    until(lambda: "\nstep ended with 1" in job.output(), 90, what=f"the end\n{job.story()}")
    assert attempts(job) == [f"{job.id}.0", f"{job.id}.1"], job.story()
    assert "not restarted: it fails at step 8 each time" in job.output(), job.output()
