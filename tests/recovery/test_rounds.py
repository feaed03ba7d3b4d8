"""An agent dies in the middle of the round that the job begins with: the job is protected all the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any
KILLER = Path(__file__).with_name("killer.py")
WHEN = ("attached", "planned", "live")


def inspect(job: LiteJob) -> dict[str, Any]:
    done = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def protected_after_a_kill(cluster: Cluster, position: int, when: str) -> LiteJob:
    """A job on the first three nodes, whose agent at this position of the tree is killed at this moment."""
    nodes = list(cluster.node_names[:3])
    program = cluster.locate_home("alice") / KILLER.name
    shutil.copy(KILLER, program)
    killer = cluster.start_command(
        ["python3", str(program), when, "40"], node=nodes[position], stderr=subprocess.STDOUT
    )
    assert killer.stdout is not None
    try:
        assert killer.stdout.readline().strip() == "ready"
        job = LiteJob(cluster, options=("-w", ",".join(nodes))).submit()
        said = killer.communicate(timeout=60)[0]
    finally:
        killer.kill()
    assert "killed" in said, f"{said}\n{job.story()}"
    try:
        job.reach(5, timeout_s=60)
        until(lambda: inspect(job)["state"] == "protected", 20, 0.2, what="inspect says that it is protected")
    except AssertionError as exc:
        raise AssertionError(f"{said}{exc}\n{job.story()}\n{inspect(job)['notes']}") from None
    for node in nodes:
        there = cluster.exec(node, ["test", "-e", f"/run/gemini-hpc/{job.id}/map"]).returncode == 0
        assert there, f"{said}no map on {node}\n{job.story()}"
    assert {n["state"] for n in inspect(job)["nodes"]} == {"live"}, job.story()
    assert any(e["name"] == "restarted" or e["name"] == "attached" for e in inspect(job)["events"])
    return job


def test_an_agent_dies_when_it_has_taken_the_plan(cluster: Cluster) -> None:
    protected_after_a_kill(cluster, 0, "planned").finish()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_agents_die_in_their_first_round(cluster: Cluster) -> None:
    for number in range(20):
        job = protected_after_a_kill(cluster, number % 2, WHEN[number // 2 % 3])
        cluster.run(["scancel", str(job.id)])
        until(lambda: not cluster.run(["squeue", "-h", "-u", "alice"]).stdout.strip(), 60, 0.1, what="job over")
        cluster.wait_idle(list(cluster.node_names[:3]))
