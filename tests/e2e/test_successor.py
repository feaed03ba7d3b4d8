"""A training that runs as two jobs, one after the other, is bit for bit the one that runs as one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sharing import Shared
from tiers import saved
from training import STEPS, Run, Training
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

Train = Callable[..., Training]
Reference = Callable[..., Run]


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """The controller forgets a job that has failed when its retention is over: within what a test waits for that."""
    settings = {"retention_s": 25.0}
    with Shared("successor", nodes=3, settings=settings) as shared:
        yield shared


def test_two_jobs_are_as_one(train: Train, reference: Reference, cluster: Cluster, tier: Path) -> None:
    """The first is cancelled: its agents save it. (tests/recovery shows a successor that takes over from memory.)"""
    wanted = reference()
    options = ["--gemini-replicas=2", f"--gemini-tier={tier}", "--gemini-tier-interval=3600"]
    first = train("first", *options)
    first.reach(8)
    cluster.run(["scancel", str(first.id)])
    until(lambda: saved(tier, first), 60, what="a version on the tier")
    second = train("second", *options, f"--gemini-after={first.id}")
    second.finish()
    assert f"from the tier of job {first.id} (" in second.output(), second.output()
    before, after = first.losses(), second.losses()
    assert max(before) < STEPS, "it was cut short"
    assert 0 <= max(before) - (min(after) - 1) <= 1, "repeats one step at most"
    assert before | after == wanted.losses() and all(before.get(n, loss) == loss for n, loss in after.items())
    assert second.final() == wanted.final()
    done = cluster.run(["gemini-hpc", "inspect", str(second.id), "--json"], user="alice")
    (took,) = [event for event in json.loads(done.stdout)["events"] if event["name"] == "took_over"]
    assert took["version"] == min(after) - 1 and "the tier" in took["detail"]
