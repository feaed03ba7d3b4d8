"""The MPI example on a real cluster: a node is cut, the requeued job ends with the field of one process."""

from __future__ import annotations

import hashlib
from itertools import islice

import pytest
from heat import LAUNCHERS, Heat, plates, swept
from leaks.cluster import nothing_left

from gemini_hpc.devcluster.cluster import Cluster

N, STEPS = 300, 50


@pytest.fixture(scope="module")
def wanted() -> str:
    """The final field's digest."""
    return hashlib.sha256(next(islice(plates(N), STEPS, None)).tobytes()).hexdigest()


@pytest.mark.parametrize("how", LAUNCHERS)
def test_a_node_is_cut(cluster: Cluster, wanted: str, how: str) -> None:
    with nothing_left(cluster, 30):
        job = Heat.submit(cluster, how, n=N, steps=STEPS, step_s=0.1)
        job.reach(15)
        host = job.hosts()[1]
        cluster.power_off(host)
        assert job.finish() == wanted
        assert "from memory" in job.said(), job.said()
        steps = [line["step"] for line in job.lines("step")]
        assert set(steps) == set(range(1, STEPS + 1)) and len(steps) - STEPS <= 1, steps
        assert job.agrees()
        cluster.power_on(host)
        cluster.resume(host)
        cluster.wait_idle(timeout_s=60)
        swept(cluster)
