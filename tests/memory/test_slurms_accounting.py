"""Requirement not-a-failure: Slurm's own memory accounting, which kills (`OverMemoryKill`), and what it makes of
replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import LiteJob
from replacing import replace
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

from .conftest import MIB

pytestmark = pytest.mark.cluster

KILL = "JobAcctGatherParams=OverMemoryKill"
SHARD = 32 * MIB  # a rank maps two slots of two shards: 128 MiB


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    extra = ["JobAcctGatherType=jobacct_gather/linux", "JobAcctGatherFrequency=task=1", KILL]
    with Shared("accounting", nodes=2, slurm_conf=extra, settings={"retention_s": 5.0}) as shared:
        yield shared


@pytest.fixture
def cluster(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with shared.lent(request) as cluster:
        yield cluster


def protected(cluster: Cluster, memory_mib: int) -> LiteJob:
    return LiteJob(cluster, nodes=2, steps=60, size=SHARD, pause_s=0.1, options=(f"--mem={memory_mib}M",)).submit()


def params(cluster: Cluster, line: str) -> None:
    conf = cluster.directory / "etc" / "slurm" / "slurm.conf"
    text = conf.read_text()
    old = next(x for x in text.splitlines() if x.startswith("JobAcctGatherParams="))
    replace(conf, text.replace(old, line))
    assert cluster.run(["scontrol", "reconfigure"]).returncode == 0


def test_a_protected_job_within_its_memory_is_left_alone(cluster: Cluster) -> None:
    """--mem with room for what the rank maps of the replicas."""
    job = protected(cluster, 600)
    job.finish()
    assert "exceeded memory limit" not in job.output()


def test_shared_pages_are_counted(cluster: Cluster) -> None:
    """What the administrators' document warns of: enough for the training, not for the replicas that it maps."""
    job = protected(cluster, 110)
    until(lambda: "exceeded memory limit" in job.output(), 40, 0.1, what="killed for memory")
    until(lambda: job.state not in ("PENDING", "RUNNING", "COMPLETING"), 20, 0.1, what="the end")
    assert not job.lines("done")


def test_noshare_counts_what_is_the_trainings_own(cluster: Cluster) -> None:
    params(cluster, KILL + ",NoShare")
    try:
        job = protected(cluster, 110)
        job.finish()
    finally:
        params(cluster, KILL)
