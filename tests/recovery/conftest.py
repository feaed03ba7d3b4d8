"""After each test its jobs are ended and nothing may be left of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness import LiteJob
from sharing import Shared

from gemini_hpc.devcluster.cluster import Cluster


@pytest.fixture
def cluster(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with shared.lent(request) as cluster:
        yield cluster


@pytest.fixture
def lite(cluster: Cluster) -> Any:
    def submit(**options: Any) -> LiteJob:
        return LiteJob(cluster, **options).submit()

    return submit
