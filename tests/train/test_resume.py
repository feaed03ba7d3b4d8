"""A resumed run is, bit for bit, the run that was never interrupted; also on nodes that lost everything."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from waiting import until

from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier

from .fake_agent import FakeJob
from .launch import Run, train

pytestmark = pytest.mark.slow

MakeJob = Callable[[int, int], FakeJob]
FULL = {"workers": 2, "accumulate": 2, "kwargs": {"audit": 1}}


def assert_continues(whole: list[dict[str, Any]], resumed: list[dict[str, Any]], version: int) -> None:
    for a, b in zip(whole, resumed, strict=True):
        assert b["start"] == version
        assert len(b["losses"]) > 2
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > version}
        assert b["digest"] == a["digest"]


@pytest.mark.parametrize(
    ("kind", "world", "nodes", "m", "more"),
    [
        ("plain", 1, 1, 1, {"scaler": True, "inf_at": 5}),
        ("ddp", 2, 2, 2, {"scaler": True, "inf_at": 5, "kwargs": {"audit": 1, "ownership": "full"}}),
        ("ddp", 3, 3, 2, {"width": 300}),  # wide enough for the order of summation in a ring to show
        pytest.param(
            *("fsdp2", 2, 2, 2, {}),
            marks=pytest.mark.witness("an FSDP2 training goes on bit for bit after the loss of a node"),
        ),
        ("fsdp2", 3, 3, 2, {"kwargs": {"audit": 1, "max_repeated": 2}}),
        ("ddp", 4, 2, 2, {"workers": 0}),
    ],
)
def test_bit_identical(make_job: MakeJob, kind: str, world: int, nodes: int, m: int, more: dict[str, Any]) -> None:
    job = make_job(nodes, m)
    job.stop_after(7)  # what a failure right after the seal of version 7 leaves
    options = {"kind": kind, "steps": 12, **FULL, **more}
    whole = train(job, world, **options, armed=True, sealed_until=7)
    assert not job.corrupt
    assert whole[0]["report"]["captured"]["eager"] == {}
    chosen = job.requeue(lost=(nodes - 1,) if m > 1 else ())
    assert chosen is not None and chosen.version == 7
    job.reached = 8
    resumed = train(job, world, seed=1234, **options)  # other weights, other generators: all must come from memory
    assert_continues(whole, resumed, 7)
    assert not job.ancestors, "memory of the same size is used again"
    assert job.sealed is not None and job.sealed.version == 12
    assert job.finished == set(range(world))
    assert len(job.saw("resumed")) == len(job.saw("first_iteration")) == world
    assert {json.loads(event.detail)["repeated"] for event in job.saw("resumed")} == {1}


@pytest.mark.witness("a DDP training that is killed goes on bit for bit")
def test_killed_in_the_middle(make_job: MakeJob) -> None:
    options: dict[str, Any] = {"kind": "ddp", **FULL, "workers": 0}
    job = make_job(2, 2)
    run = Run(job, 2, {**options, "steps": 100_000, "sleep_s": 0.02})
    until(lambda: job.sealed and job.sealed.version >= 9, every_s=0.001, what="version 9 is sealed")
    for process in run.processes:
        process.signal(signal.SIGKILL)
    run.wait(codes=(-signal.SIGKILL,))
    sealed = job.sealed
    assert sealed is not None
    chosen = job.requeue(lost=(0,))
    assert chosen is not None and chosen.version >= sealed.version
    options["steps"] = chosen.version + 5
    assert_continues(train(None, 2, **options), train(job, 2, seed=5, **options), chosen.version)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("ddp", 4), ("ddp", 2)),
        pytest.param(
            *(("fsdp2", 3), ("fsdp2", 2)),
            marks=pytest.mark.witness("a version is loaded by another number of ranks"),
        ),
        (("fsdp2", 2), ("plain", 1)),
        (("ddp", 2), ("fsdp2", 3)),
    ],
)
def test_resharding(make_job: MakeJob, before: tuple[str, int], after: tuple[str, int]) -> None:
    options = {"steps": 4, "norm": "layer", "samples": 210}
    job = make_job(1, 1)
    saved = train(job, before[1], kind=before[0], sleep_s=0.05, **options)
    chosen = job.requeue()
    assert chosen is not None
    loaded = train(job, after[1], kind=after[0], seed=77, **options)
    assert loaded[0]["start"] == chosen.version == 4
    assert {r["digest"] for r in loaded} == {saved[0]["digest"]}


@pytest.mark.parametrize(("replicas", "says"), [(1, "no node may be lost"), (2, "any 1 node of a group may be lost")])
def test_the_first_seal_is_reported_once(make_job: MakeJob, replicas: int, says: str) -> None:
    run = Run(make_job(2, replicas), 2, {"kind": "ddp", "steps": 6, "sleep_s": 0.05})
    run.wait()
    assert run.stderr[0].count("gemini-hpc: protected since step ") == 1 and says in run.stderr[0]
    assert "protected since" not in run.stderr[1]


def test_a_different_model_is_refused(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    train(job, 1, steps=4, sleep_s=0.05)
    assert job.requeue() is not None
    run = Run(job, 1, {"steps": 6, "width": 48})
    run.wait(codes=(1,))
    assert "does not fit this training" in run.stderr[0]
    assert "model.embed.weight is (50, 48)" in run.stderr[0]


def test_nothing_to_resume_from_says_why(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    job.lost = ("shard 3: both holders are gone",)
    run = Run(job, 1, {"steps": 2})
    assert run.wait()[0]["start"] == 0
    assert "shard 3: both holders are gone" in run.stderr[0]


def saved_and_requeued(job: FakeJob) -> None:
    train(job, 2, kind="ddp", steps=4, sleep_s=0.05)
    assert job.requeue() is not None


def test_a_version_that_cannot_be_loaded_is_left_for_the_next_launch(make_job: MakeJob) -> None:
    """Training from 0 would replace it by version 1 of the next epoch, once that is sealed."""
    job = make_job(2, 2)
    saved_and_requeued(job)
    shards = [node.held.pop(1) for node in job.nodes]
    run = Run(job, 2, {"kind": "ddp", "steps": 6})
    run.wait(codes=(75,))
    assert "nobody holds shard 1" in run.stderr[0]
    assert "version 4 cannot be read on every rank; ending with exit status 75" in run.stderr[0]
    assert not any("Traceback" in err for err in run.stderr)
    assert not job.finished
    for node, shard in zip(job.nodes, shards, strict=True):
        node.held[1] = shard
    assert [r["start"] for r in train(job, 2, kind="ddp", steps=6)] == [4, 4]


def test_a_version_is_not_trained_over_where_one_agent_is_missing(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    saved_and_requeued(job)
    job.nodes[1].die()
    run = Run(job, 2, {"kind": "ddp", "steps": 6})
    run.wait(codes=(75,))
    assert "version 4 is in memory, but cannot be used: no agent at" in run.stderr[0]
    assert not job.finished


def test_what_the_agents_cannot_see_for_long_is_not_trained_over(make_job: MakeJob) -> None:
    """As what is on a tier that is away."""
    job = make_job(2, 2)
    saved_and_requeued(job)
    job.not_yet = 1000
    run = Run(job, 2, {"kind": "ddp", "steps": 6, "not_yet_s": 1.0})
    run.wait(codes=(75,))
    assert "gemini-hpc: waiting: the tier cannot be seen\n" in run.stderr[0] and "waiting" not in run.stderr[1]
    assert "the tier cannot be seen; ending with exit status 75" in run.stderr[0]
    assert not any("Traceback" in err for err in run.stderr) and not job.finished
    job.not_yet = 0
    assert [r["start"] for r in train(job, 2, kind="ddp", steps=6)] == [4, 4]


def test_the_agents_hear_which_tier_the_program_chooses(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    train(job, 1, steps=1, kwargs={"tier": "/lustre/t"})
    assert [hello.tier for hello in job.nodes[0].hellos] == [Tier("/lustre/t")]


def test_an_agent_that_dies_over_the_hello_is_asked_again(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    saved_and_requeued(job)
    job.delay["Hello"] = 0.5
    before, asked = len(job.nodes[1].hellos), len(job.nodes[1].asked)
    run = Run(job, 2, {"kind": "ddp", "steps": 6})
    until(lambda: local.Hello in job.nodes[1].asked[asked:], every_s=0.001, what="a hello")
    kept, job.nodes[1].held = job.nodes[1].held, {}
    job.nodes[1].die()
    job.nodes[1].held = kept
    time.sleep(0.05)
    job.nodes[1].start()
    assert [r["start"] for r in run.wait()] == [4, 4]
    assert len(job.nodes[1].hellos) > before
