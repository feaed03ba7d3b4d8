"""A site with a health check: a red node is left, or drained, at the first failure of a rank there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import LiteJob
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

CHECK = Path(__file__).with_name("red_if_told")
LAUNCH = "python -m gemini_hpc.launch"


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    settings: dict[str, str | int | float | bool] = {"retention_s": 20.0, "health_check": str(CHECK)}
    with Shared("health", nodes=4, settings=settings) as shared:
        yield shared


@pytest.fixture
def cluster(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with shared.lent(request) as cluster:
        yield cluster
        for node in cluster.node_names:
            cluster.exec(node, ["rm", "-f", "/run/red"])


def fail(job: LiteJob, place: int, *, red: str) -> str:
    """The rank of a node is killed; red: what the check says there then. The node."""
    node = job.hosts()[place]
    if red:
        assert job.cluster.exec(node, ["sh", "-c", f"echo '{red}' > /run/red"]).returncode == 0
    newest = max((x for x in job.lines("resumed") if x["node_rank"] == place), key=lambda x: x["t"])
    assert job.cluster.exec(node, ["kill", "-9", str(newest["pid"])]).returncode == 0, job.story()
    return node


def begun(job: LiteJob, since: float) -> dict[int, int]:
    """Processes by node rank, of attempts that began after this."""
    return {x["node_rank"]: x["pid"] for x in job.lines("resumed") if x["t"] > since}


def test_a_red_node_is_left(cluster: Cluster) -> None:
    job = LiteJob(cluster, python=LAUNCH, options=("-N4", "--no-kill", "--gemini-spares=1")).submit()
    job.reach(10)
    spare = job.hosts()[3]
    began = time.time()
    node = fail(job, 1, red="Xid 79: GPU has fallen off the bus")
    until(lambda: "without" in [e["name"] for e in job.events()], 20, what=f"left\n{job.story()}")

    def on_the_spare() -> bool:
        pid = begun(job, began).get(1)
        return bool(pid) and cluster.exec(spare, ["kill", "-0", str(pid)]).returncode == 0

    until(on_the_spare, 30, what=f"the spare trains\n{job.story()}")
    details = {e["name"]: e["detail"] for e in job.events()}
    assert details["sick"] == f"health check on {node}: Xid 79: GPU has fallen off the bus: left", details
    job.finish(60)
    assert job.state == "COMPLETED" and job.slurm()["Restarts"] == "0", job.story()


def test_without_a_spare_it_is_drained_and_a_green_one_is_not(cluster: Cluster) -> None:
    job = LiteJob(cluster, python=LAUNCH).submit()
    job.reach(10)
    began = time.time()
    green = fail(job, 1, red="")
    until(lambda: len(begun(job, began)) == 3, 30, what=job.story())
    job.reach(max(x["version"] for x in job.lines("resumed")) + 3)
    began = time.time()
    node = fail(job, 2, red="Xid 48")
    reason = f"gemini-hpc: sick, job {job.id} restart 0: health check on {node}: Xid 48"
    until(lambda: reason in cluster.run(["scontrol", "show", "node", node]).stdout, 20, what=job.story())
    until(lambda: len(begun(job, began)) == 3, 30, what=f"it goes on\n{job.story()}")
    assert "this node is not healthy: Xid 48" in job.output()
    job.finish(60)
    assert job.state == "COMPLETED" and "DRAIN" not in cluster.run(["scontrol", "show", "node", green]).stdout
