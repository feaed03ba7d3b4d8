"""A training that runs as two jobs, one after the other, is bit for bit the one that runs as one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest
from training import STEPS, Training
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.tier import version

pytestmark = pytest.mark.cluster

Train = Callable[..., Training]
Reference = Callable[[str], Training]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The controller forgets a job that has failed when its retention is over: within what a test waits for that."""
    settings = {"retention_s": 25.0, "attach_timeout_s": 40.0}
    with Cluster.up(f"e2e{os.getpid()}", nodes=3, settings=settings) as cluster:
        yield cluster


@pytest.mark.parametrize("place", ["memory", "the tier"])
def test_two_jobs_are_as_one(train: Train, reference: Reference, cluster: Cluster, place: str) -> None:
    """The first is killed with its script: its memory is there. Or it is cancelled: agents have saved it by then."""
    wanted, tier = reference("ddp"), cluster.home("alice") / "tier-of-two"
    tier.mkdir(exist_ok=True)
    tier.chmod(0o777)
    options = ["--gemini-replicas=2", f"--gemini-tier={tier}", "--gemini-tier-interval=3600"]
    first = train("first", *(options if place != "memory" else options[:1]))
    first.reach(8)
    if place == "memory":
        cluster.run(["scancel", "--full", "--signal=USR1", str(first.id)])
        until(lambda: first.state == "FAILED", 60, what="its end")
    else:
        cluster.run(["scancel", str(first.id)])
        saved = f"{version.job_directory(str(tier), first.id)}/default"
        until(lambda: next(version.whole(saved), None), 60, what="a version on the tier")
    second = train("second", *options, f"--gemini-after={first.id}")
    second.finish()
    assert f"from {place} of job {first.id} (" in second.output(), second.output()
    before, after = first.losses(), second.losses()
    assert max(before) < STEPS, "it was cut short"
    assert 0 <= max(before) - (min(after) - 1) <= 1, "repeats one step at most"
    assert before | after == wanted.losses() and all(before.get(n, loss) == loss for n, loss in after.items())
    assert second.final() == wanted.final()
    done = cluster.run(["gemini-hpc", "inspect", str(second.id), "--json"], user="alice")
    (took,) = [event for event in json.loads(done.stdout)["events"] if event["name"] == "took_over"]
    assert took["version"] == min(after) - 1 and place in took["detail"]
