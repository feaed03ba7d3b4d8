"""A job that is held: its copies stay for a time of their own, and when they are freed everybody is told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from harness import LiteJob
from sharing import Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

ENDED_S, HELD_S = 8.0, 25.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    settings = {"retention_s": ENDED_S, "held_retention_s": HELD_S}
    with Shared("held", nodes=3, settings=settings) as shared:
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


def hold(job: LiteJob) -> None:
    job.cluster.run(["scontrol", "requeuehold", str(job.id)])
    until(lambda: job.state == "PENDING", 30, what="held")


def test_copies_outlive_the_retention_of_ended_jobs(job: LiteJob) -> None:
    hold(job)
    since = time.monotonic()
    while time.monotonic() - since < 1.5 * ENDED_S:
        time.sleep(0.5)
    found = looked_at(job)
    assert found["kept_until"] > found["t"], found
    assert any(note.startswith("copies are kept until") for note in found["notes"]), found["notes"]
    job.cluster.run(["scontrol", "release", str(job.id)])
    job.finish()
    assert job.resumed(int(job.slurm()["Restarts"])) > 0, job.story()


def test_freed_copies_are_told(job: LiteJob) -> None:
    hosts = job.hosts()
    hold(job)
    until(lambda: not any(job.agent_pid(node) for node in hosts), 90, 0.5, what="let go")
    found = looked_at(job)
    assert found["kept_until"] is None and any(note.startswith("lost: the copies") for note in found["notes"]), found
    gone = [e for e in found["events"] if e["name"] == "released" and e["version"]]
    assert {e["host"] for e in gone} == set(hosts) and all("held" in e["detail"] for e in gone), gone
    job.cluster.run(["scontrol", "release", str(job.id)])
    job.finish()
    assert job.resumed(int(job.slurm()["Restarts"])) == 0, job.story()
    notices = {line["text"] for line in job.lines("notice")}
    assert any(text.startswith("lost: the copies of version") for text in notices), job.story()
