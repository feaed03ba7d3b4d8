"""Two nodes that hold each other's copies are cut off for some seconds, in a job with spares: nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from harness import LiteJob
from sharing import Shared

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

CUT_S = 5.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """Whose controller is even slower to call a node dead than at a site."""
    settings = {"retention_s": 20.0, "fence_confirm_s": 3 * CUT_S}
    with Shared("pair", nodes=6, settings=settings) as shared:
        yield shared


def test_nodes_that_alone_hold_something_are_waited_for(cluster: Cluster) -> None:
    options = ("-N6", "--no-kill", "--gemini-spares=2")
    job = LiteJob(cluster, nodes=4, run="srun", python="python -m gemini_hpc.launch", options=options).submit()
    job.reach(10)
    pair = job.hosts()[2:4]
    for host in pair:
        cluster.exec(host, ["ip", "link", "set", "eth0", "down"])
    time.sleep(CUT_S)
    for host in pair:
        cluster.exec(host, ["ip", "link", "set", "eth0", "up"])
    job.finish(120)
    assert "waits" in [event["name"] for event in job.events()], job.story()
    assert job.slurm()["Restarts"] == "0" and job.state == "COMPLETED", job.story()
    assert all(line["version"] > 9 for line in job.lines("resumed") if "+" in line["step"]), job.story()
