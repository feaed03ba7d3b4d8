"""Many small agents on a node end nobody else's: each has room of its own, beside the cap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import LiteJob
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster import cgroups
from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.node import oom
from gemini_hpc.node.memory_cgroup import AGENT_ROOM_BYTES

from .conftest import MIB

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not cgroups.are_possible(), reason="no writable memory cgroup (v1) on this machine"),
]
CAP_BYTES, SMALL = 120 * MIB, 8
TOP = "/sys/fs/cgroup/memory/gemini-hpc"


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    settings = {"retention_s": 5.0, "memory_cap_bytes": CAP_BYTES, "memory_floor_bytes": MIB}
    with Shared("small", nodes=2, cpus=16, settings=settings) as shared, shared.lent(request) as cluster:
        yield cluster


def test_small_agents_end_nobody_elses(cluster: Cluster) -> None:
    """The kernel took the one with copies, its supervisor too; its job was not protected from then on."""
    job = LiteJob(cluster, nodes=2, size=12 * MIB, options=("-c8",)).submit()
    job.reach(5)
    before, node = job.agent_pid("n1"), "n1"
    options = ["-N1", f"-w{node}", "-n1", "--mem=20", "--gemini-replicas=1"]
    others = list[int]()

    def submit(count: int) -> None:
        for _ in range(count):
            others.append(cluster.submit_job(options, user="bob", script="#!/bin/sh\nsleep 600\n"))
        until(ready, 60, what="the small agents are ready")

    def ask(script: str) -> str:
        return cluster.exec(node, ["sh", "-c", script]).stdout.strip()

    def ready() -> bool:
        return all(ask(f"ls /run/gemini-hpc/{other}/map 2>&-") for other in others)

    submit(SMALL - 1)  # Slurm runs their prologs side by side
    submit(1)
    assert ask(f"cat {TOP}/*/memory.oom_control {TOP}/memory.oom_control | grep -c 'oom_kill 0'") == (
        ask(f"cat {TOP}/*/memory.oom_control {TOP}/memory.oom_control | grep -c oom_kill' '")
    )
    assert int(ask(f"cat {TOP}/memory.limit_in_bytes")) >= CAP_BYTES + (SMALL + 1) * AGENT_ROOM_BYTES
    assert job.agent_pid(node) == before
    agents = [before, *(LiteJob(cluster, id=other).agent_pid(node) for other in others)]
    scores = [int(ask(f"cat /proc/{pid}/oom_score_adj")) for pid in agents]
    assert scores == [oom.WITH_COPIES, *[oom.WITHOUT_COPIES] * (SMALL - 1), oom.NEWEST]
    at = max(line["version"] for line in job.lines("sealed"))
    job.reach(at + 5)
    for other in others:
        cluster.run(["scancel", str(other)])
    job.finish()
