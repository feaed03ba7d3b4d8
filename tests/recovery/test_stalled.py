"""A training that stands still on healthy nodes, as its owner's `inspect` shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from harness import LiteJob
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

LEAST_S = 3.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    settings = {"retention_s": 20.0, "stalled_s": LEAST_S}
    with Shared("stalled", nodes=3, settings=settings) as shared:
        yield shared


@pytest.fixture
def job(cluster: Cluster) -> LiteJob:
    job = LiteJob(cluster).submit()
    job.reach(10)
    return job


def looked_at(job: LiteJob) -> Any:
    done = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def signal_rank(job: LiteJob, name: str) -> None:
    done = job.cluster.exec(job.hosts()[1], ["pkill", f"-{name}", "-f", "lite[.]py"])
    assert done.returncode == 0


def test_a_rank_that_is_stopped(job: LiteJob) -> None:
    until(lambda: looked_at(job)["state"] == "protected", 20, what="protected")
    signal_rank(job, "STOP")
    until(lambda: looked_at(job)["state"] == "stalled", 60, 0.5, what="stalled")
    found = looked_at(job)["trainings"][0]
    assert found["stalled"]["for_s"] > LEAST_S > found["stalled"]["usual_s"] > 0, found
    text = job.cluster.run(["gemini-hpc", "inspect", str(job.id)], user="alice").stdout
    assert "stalled: no step for" in text and "(usually" in text, text
    signal_rank(job, "CONT")
    until(lambda: looked_at(job)["state"] == "protected", 30, 0.2, what="it goes on")
    job.finish()
