"""Every holder of some shards dies, and the ranks that live have their tensors: copies are made of these."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import until

from .agents import RealJob
from .conftest import HOST, STEPS
from .launch import Run, train

pytestmark = pytest.mark.slow

MakeJob = Callable[..., RealJob]
Begin = Callable[..., Run]
DDP = {"kind": "ddp", "width": 128, "norm": "layer", "steps": STEPS, "kwargs": HOST}
AT = 20
PROFILED = 9  # while it is profiled, all that is saved waits for the optimizer
STANDS = {"pause_at": AT, "pause_sealed": True, "pause_s": 30.0}


@pytest.fixture
def begin() -> Iterator[Begin]:
    runs: list[Run] = []

    def start(job: RealJob, world: int, **options: Any) -> Run:
        runs.append(Run(job, world, {**DDP, **options}))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for process in (p for r in runs for p in r.processes):
        process.signal(signal.SIGKILL)
        process.wait(10)


def lose(job: RealJob, run: Run, nodes: range) -> None:
    """At once, with the ranks, one on each."""
    for k in nodes:
        run.processes[k].signal(signal.SIGKILL)
        node = job.nodes[k].process
        assert node is not None
        node.kill()
    for k in nodes:
        job.nodes[k].die()


def stop(run: Run) -> None:
    for process in run.processes:
        process.signal(signal.SIGKILL)
        process.wait(10.0)


def sealed(job: RealJob) -> int:
    """The newest version, as the first node knows it."""
    stamps = [training.sealed for training in job.inspect(job.nodes[0]).trainings]
    return stamps[0][1] if stamps and stamps[0] is not None else 0


def test_a_whole_group_is_lost(make_agents: MakeJob, begin: Begin) -> None:
    whole = train(None, 4, **DDP)
    job = make_agents(4, 2)
    run = begin(job, 4, **STANDS)
    until(lambda: all(job.held(node, r) for r, node in enumerate(job.nodes)), 60, what="protected")
    until(lambda: AT in {v for _, v in job.held(job.nodes[0], 0)}, 60, what="at the pause")
    until(lambda: sealed(job) == AT, 30, what="sealed")
    lose(job, run, range(2, 4))
    for shard in (2, 3):
        until(lambda s=shard: any(job.held(n, s) for n in job.nodes[:2]), 10, what=f"{shard}: {job.nodes[0].log()}")
    stop(run)
    job.requeue(["n1", "n2", "n5", "n6"])
    results = begin(job, 4).wait()
    assert [r["start"] for r in results] == [AT] * 4, "no step repeated"
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]


def test_a_whole_group_is_lost_before_the_others_copies_are_complete(make_agents: MakeJob, begin: Begin) -> None:
    """Ranks that live hang in a collective, and what they save waits for a span without one: that goes at once."""
    whole = train(None, 4, **DDP)
    job = make_agents(4, 2)
    run = begin(job, 4, **{**STANDS, "pause_sealed": False, "pausing": [2, 3], "pause_at": PROFILED})
    until(lambda: sealed(job) == PROFILED - 1, 60, what="the seal before")
    time.sleep(1.0)  # its outlines have come
    assert PROFILED not in {v for k in (0, 1) for _, v in job.held(job.nodes[k], k)}, "the test's own condition"
    lose(job, run, range(2, 4))
    for k in range(4):
        until(
            lambda k=k: any((1, PROFILED) in job.held(n, k) for n in job.nodes[:2]),
            10,
            what=f"{k}: {job.nodes[0].log()}",
        )
    stop(run)
    job.requeue(["n1", "n2", "n5", "n6"])
    results = begin(job, 4).wait()
    assert [r["start"] for r in results] == [PROFILED] * 4, "no step repeated"
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]


def test_one_replica_and_any_node_may_be_lost(make_agents: MakeJob, begin: Begin) -> None:
    """Nothing is sent in steady state: what a lost node had lives in the ranks of the others."""
    whole = train(None, 3, **DDP)
    job = make_agents(3, 1)
    run = begin(job, 3, **STANDS)
    until(lambda: AT in {v for _, v in job.held(job.nodes[0], 0)}, 60, what="at the pause")
    until(lambda: sealed(job) == AT, 30, what="sealed")
    lose(job, run, range(1, 2))
    until(lambda: any(job.held(job.nodes[k], 1) for k in (0, 2)), 10, what="copied")
    stop(run)
    job.requeue(["n1", "n3", "n4"])
    again = begin(job, 3)
    results = again.wait()
    assert "one replica: no copies are sent" in again.stderr[0] and not again.stderr[1]
    assert [r["start"] for r in results] == [AT] * 3, "no step repeated"
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]
    assert not any(r["report"]["versions"]["sent_bytes"] for r in results)
