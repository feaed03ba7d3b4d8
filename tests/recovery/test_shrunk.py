"""Jobs whose nodes are not those that they were submitted for, or began with; and what their owner is told of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any


def looked_at(job: LiteJob) -> Any:
    done = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_job_that_is_made_smaller_while_it_runs(lite: Lite, cluster: Cluster) -> None:
    """Its step has lost ranks, so nothing protects it; and the node that it has left is no loss of its own."""
    job = lite()
    job.reach(10)
    left = job.hosts()[2]
    until(lambda: looked_at(job)["state"] == "protected", 20, what="protected")
    ways = ("NumNodes=2", f"NodeList={','.join(job.hosts()[:2])}")  # 26.05 has the second only
    asked = [cluster.run(["scontrol", "update", f"JobId={job.id}", way]) for way in ways]
    assert 0 in [done.returncode for done in asked], asked
    until(lambda: any(e["name"] == "shrunk" for e in job.events()), 30, 0.5, what="seen")
    found = looked_at(job)
    assert found["state"] != "protected" and left not in found["slurm"]["nodes"], found
    assert any(f"made smaller while it ran: without {left}" in note for note in found["notes"]), found["notes"]
    cluster.cut_power(left)
    until(lambda: "down" in cluster.read_node_states()[left], 60, 0.5, what="Slurm itself has noticed")
    assert job.slurm()["Restarts"] == "0" and not any(e["name"] == "sent_back" for e in job.events()), job.story()
    cluster.run(["scancel", str(job.id)])


def test_a_node_list_of_the_user_that_has_lost_a_node(lite: Lite) -> None:
    job = lite(options=("-w", "n1,n2,n3"))
    job.reach(10)
    job.cluster.cut_power("n2")
    job.reach(1, "resumed", 60, 1)
    assert {"n1", "n3"} < set(job.hosts()), "kept as far as possible"
    notes = looked_at(job)["notes"]
    assert any("submitted for n1,n2,n3, no longer on n2" in note for note in notes), notes
    job.finish()
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
