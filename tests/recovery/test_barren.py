"""A job that loses its nodes again and again, and gets nowhere: held in place of burnt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import LiteJob
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    settings = {"retention_s": 20.0, "fence_budget_nodes": 1000, "recoveries_without_progress": 1}
    with Shared("barren", nodes=5, settings=settings) as shared:
        yield shared


def lose_a_node(job: LiteJob, restart: int) -> None:
    """Once its ranks train in this life of it."""
    until(lambda: len(job.lines("resumed", restart)) == 3, 60, what=f"life {restart}\n{job.story()}")
    job.cluster.cut_power(job.hosts()[-1])
    until(lambda: job.slurm().get("Restarts") == str(restart + 1), 60, what=f"requeued\n{job.story()}")


def test_it_is_held_and_its_owner_releases_it(cluster: Cluster) -> None:
    """Its steps take so long that no life of it seals a version."""
    job = LiteJob(cluster, pause_s=600.0).submit()
    lose_a_node(job, 0)
    lose_a_node(job, 1)
    assert job.resumed(1) == 0, job.story()
    until(lambda: job.slurm().get("Reason") == "JobHeldUser", 30, what=f"held\n{job.story()}")
    why = "1 recovery sealed nothing at all"
    assert f"gemini-hpc: held: {why}" in cluster.run(["scontrol", "show", "job", str(job.id)]).stdout
    until(lambda: [e["detail"] for e in job.events() if e["name"] == "held"] == [why], 10, what=job.story())
    until(lambda: "gemini_" not in cluster.run(["scontrol", "show", "reservation"]).stdout, 20, what="let go")
    assert cluster.run(["scontrol", "release", str(job.id)], user="alice").returncode == 0
    until(lambda: len(job.lines("resumed", 2)) == 3, 60, what=f"it runs\n{job.story()}")
    assert cluster.run(["scancel", str(job.id)], user="alice").returncode == 0
