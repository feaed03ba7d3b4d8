"""A training that stands still on healthy nodes, as its owner's `inspect` shows it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from harness import LiteJob, clean
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

LEAST_S = 3.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    settings = {"retention_s": 20.0, "stalled_s": LEAST_S}
    with Cluster.up(f"stalled{os.getpid()}", nodes=3, settings=settings) as cluster:
        yield cluster


@pytest.fixture
def job(shared: Cluster) -> Iterator[LiteJob]:
    with clean(shared):
        job = LiteJob(shared).submit()
        job.reach(10)
        yield job


def looked_at(job: LiteJob) -> Any:
    done = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def signal_rank(job: LiteJob, name: str) -> None:
    done = job.cluster.exec(job.hosts()[1], ["pkill", f"-{name}", "-f", "lite[.]py"])
    assert done.returncode == 0


def test_a_rank_that_is_stopped(job: LiteJob) -> None:
    assert looked_at(job)["state"] == "protected"
    signal_rank(job, "STOP")
    until(lambda: looked_at(job)["state"] == "stalled", 60, 0.5, what="stalled")
    found = looked_at(job)["trainings"][0]
    assert found["stalled"]["for_s"] > LEAST_S > found["stalled"]["usual_s"] > 0, found
    text = job.cluster.run(["gemini-hpc", "inspect", str(job.id)], user="alice").stdout
    assert "stalled: no step for" in text and "(usually" in text, text
    signal_rank(job, "CONT")
    until(lambda: looked_at(job)["state"] == "protected", 30, 0.2, what="it goes on")
    job.finish()


def test_a_job_that_is_suspended(job: LiteJob) -> None:
    job.cluster.run(["scontrol", "suspend", str(job.id)])
    until(lambda: job.state == "SUSPENDED", 20, what="suspended")
    seen = set()
    end = time.monotonic() + 20 * LEAST_S / 3
    while time.monotonic() < end:
        seen.add(looked_at(job)["state"])
        time.sleep(0.5)
    job.cluster.run(["scontrol", "resume", str(job.id)])
    until(lambda: job.state == "RUNNING", 20, what="resumed")
    at = job.completed(time.time())
    while job.completed(time.time()) < at + 5:
        seen.add(looked_at(job)["state"])
    assert "stalled" not in seen, seen
    job.finish()
