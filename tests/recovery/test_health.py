"""A site with a health check: a job leaves a red node; it is drained when root has found it red, after the job."""

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
SAY_RED = Path(__file__).with_name("say_red.py")
LAUNCH = "python -m gemini_hpc.launch"


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    settings: dict[str, str | int | float | bool] = {
        "retention_s": 20.0,
        "health_check": str(CHECK),
        "sick_nodes_per_day": 8,
    }
    with Shared("health", nodes=4, settings=settings) as shared:
        yield shared


@pytest.fixture
def cluster(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with shared.lent(request) as cluster:
        yield cluster
        for node in cluster.node_names:
            cluster.exec(node, ["rm", "-f", "/tmp/red"])


def fail(job: LiteJob, place: int, *, red: str) -> str:
    """The rank of a node is killed; red: what the check says there then. The node."""
    node = job.hosts()[place]
    if red:
        assert job.cluster.exec(node, ["sh", "-c", f"echo '{red}' > /tmp/red"]).returncode == 0
    newest = max((x for x in job.lines("resumed") if x["node_rank"] == place), key=lambda x: x["t"])
    assert job.cluster.exec(node, ["kill", "-9", str(newest["pid"])]).returncode == 0, job.story()
    return node


def begun(job: LiteJob, since: float) -> dict[int, int]:
    """Processes by node rank, of attempts that began after this."""
    return {x["node_rank"]: x["pid"] for x in job.lines("resumed") if x["t"] > since}


def state(cluster: Cluster, node: str) -> str:
    return cluster.run(["scontrol", "show", "node", node]).stdout


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
    assert (
        details["sick"] == f"health check on {node}: Xid 79: GPU has fallen off the bus: the job moves off {node}"
    ), details
    job.finish(60)
    assert job.state == "COMPLETED" and job.slurm()["Restarts"] == "0", job.story()
    until(lambda: "DRAIN" in state(cluster, node), 20, what="drained by root's own check")


def say_red(job: LiteJob, node: str, accused: str, user: str | None = None) -> str:
    """Say to the controller, from a node, that another one is red; return the answer."""
    argv = ["/opt/gemini-hpc/venv/bin/python", "-I", str(SAY_RED), str(job.id), accused]
    done = job.cluster.exec(node, argv, user)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_root_checks_after_the_job_and_only_a_red_node_is_drained(cluster: Cluster) -> None:
    job = LiteJob(cluster, python=LAUNCH).submit()
    job.reach(10)
    began = time.time()
    green = fail(job, 1, red="")
    until(lambda: len(begun(job, began)) == 3, 30, what=job.story())
    job.reach(max(x["version"] for x in job.lines("resumed")) + 3)
    began = time.time()
    red = fail(job, 2, red='Xid 48"\nReason=free')
    until(lambda: len(begun(job, began)) == 3, 30, what=f"it goes on\n{job.story()}")
    until(
        lambda: "the job stays on" in {e["name"]: e["detail"] for e in job.events()}.get("sick", ""),
        20,
        what=job.story(),
    )
    assert " is not healthy: Xid 48" in job.output()
    assert "only root reports a node's health" in say_red(job, red, red, user="alice")
    assert "DRAIN" not in state(cluster, red), "the job's word is not enough"
    job.finish(60)
    reason = f"Reason=gemini-hpc: sick, the health check is red, after job {job.id} restart 0 ["
    until(lambda: reason in state(cluster, red), 20, what=state(cluster, red))
    assert job.state == "COMPLETED"
    assert "DRAIN" not in state(cluster, green), state(cluster, green)


def test_root_of_another_node_is_not_believed(cluster: Cluster) -> None:
    job = LiteJob(cluster, python=LAUNCH).submit()
    job.reach(5)
    node, accused = job.hosts()[:2]
    assert say_red(job, node, accused) == "LinkClosed"
    assert "health is reported from elsewhere" in (cluster.log_directory / "controller.log").read_text()
    assert "DRAIN" not in state(cluster, accused)
    assert say_red(job, accused, accused) == "drained" and "DRAIN" in state(cluster, accused)
    job.finish(60)
