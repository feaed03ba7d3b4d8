"""One cluster for each file of recovery tests; after each test its jobs are ended and nothing may be left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from harness import LiteJob, restore, wait_for
from leaks import assert_nothing_new
from leaks.cluster import present

from gemini_hpc.devcluster.cluster import Cluster


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    settings = {"retention_s": 20.0, "fence_budget_nodes": 1000, "self_fence_s": 6.0}
    with Cluster.up(f"recovery{os.getpid()}", nodes=7, settings=settings) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    if shared_cluster.controller_pid() is None:
        shared_cluster.controller_start()
    yield shared_cluster
    shared_cluster.run(["scancel", "--user=alice"])
    shared_cluster.run(["scancel", "--user=bob"])
    wait_for("queue empty", lambda: not shared_cluster.run(["squeue", "-h"]).stdout.strip(), 60, 0.1)
    if shared_cluster.controller_pid() is None:
        shared_cluster.controller_start()
    restore(shared_cluster)
    assert_nothing_new({}, lambda: present(shared_cluster), 30)


@pytest.fixture
def lite(cluster: Cluster) -> Any:
    def submit(**options: Any) -> LiteJob:
        return LiteJob(cluster, **options).submit()

    return submit
