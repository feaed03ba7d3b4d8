"""The host transport: real agents on the loopback interface bring the copies, whatever dies."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from waiting import until

from .agents import RealJob, RealNode
from .conftest import HOST, STEPS, Pause
from .launch import Run, train

pytestmark = pytest.mark.slow

MakeJob = Callable[..., RealJob]
Start = Callable[..., Run]


@pytest.fixture
def make_job(make_agents: MakeJob) -> MakeJob:
    return make_agents


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """Digests of the final state of a training without us."""
    return [r["digest"] for r in train(None, 2, kind="ddp", steps=STEPS)]


@pytest.fixture
def run(start: Start) -> Start:
    return start


def sealed(job: RealJob, node: RealNode) -> int:
    trainings = job.inspect(node).trainings
    return trainings[0].sealed[1] if trainings and trainings[0].sealed is not None else 0


def both_hold(job: RealJob, version: int) -> None:
    """Both shards of it, once the agents have verified the last copies."""
    until(
        lambda: all((1, version) in job.held(node, rank) for node in job.nodes for rank in (0, 1)),
        what=f"version {version} on both nodes",
    )


def travels_over(job: RealJob, node: RealNode) -> set[str]:
    """As `inspect` tells it."""
    return {state.transport for s in job.inspect(node).trainings for _, state in s.traffic}


def test_bitwise_equal_and_on_both_nodes(make_job: MakeJob, run: Start, undisturbed: list[str]) -> None:
    job = make_job(2, 2)
    results = run(job).wait()
    assert [r["digest"] for r in results] == undisturbed
    for r in results:
        report = r["report"]
        assert report["state"] == "protected" and not report["unsaved"], report
        assert report["sealed"][1] >= STEPS - 1 and report["received"][str(1 - r["rank"])] >= STEPS - 1, report
    assert all(travels_over(job, node) == {"host"} for node in job.nodes)
    both_hold(job, STEPS)


def test_auto_is_host_also_for_a_training_on_a_device(make_job: MakeJob, run: Start, undisturbed: list[str]) -> None:
    """NCCL could be had (on the fake device), and has not been measured to be better."""
    job = make_job(2, 2)
    results = run(job, lagging={"collective_s": 0.002}, gpu={}, kwargs={"seal_timeout_s": 3.0}).wait()
    assert [r["digest"] for r in results] == undisturbed
    for r in results:
        assert r["report"]["state"] == "protected" and not r["report"]["unsaved"], r["report"]
        assert r["report"]["traffic"]["transport"] == "host"
        assert r["report"]["gpu"] == {"pinned": 0, "pins": 4, "exchanges": 0}
    assert all(travels_over(job, node) == {"host"} for node in job.nodes)
    both_hold(job, STEPS)


def test_a_node_is_lost_beside_a_device(make_job: MakeJob, run: Start) -> None:
    """Batch statistics come to the host long after the training has gone on."""
    settings = {"lagging": {"collective_s": 0.002}, "gpu": {}, "kwargs": {"seal_timeout_s": 3.0}, "norm": "batch"}
    whole = train(None, 2, kind="ddp", steps=STEPS, norm="batch")
    job = make_job(2, 2)
    run(job, die_at=25, **settings).wait(codes=(1,))
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    results = run(job, **settings).wait()
    assert {r["start"] for r in results} in ({24}, {25})
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]


@pytest.mark.witness("agents bring the copies, and a training gets from them what a lost node had")
def test_a_node_is_lost(make_job: MakeJob, run: Start, undisturbed: list[str]) -> None:
    """What the replacement gets of its dead predecessor's shard is what had been pushed to the survivor."""
    job = make_job(2, 2)
    run(job, die_at=25, peek=True).wait(codes=(1,))
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    assert [node.name for node in job.nodes] == ["n1", "n3"]
    started = run(job, peek=True, armed=True, sealed_until=STEPS)
    results = started.wait()
    assert {r["start"] for r in results} in ({24}, {25}), "one step repeated at most"
    start = results[0]["start"]
    told = started.stderr[0]
    assert re.search("gemini-hpc: node n2 (lost|has left the job); n3 takes its place", told), told
    cost = "no step repeated" if start == 25 else "1 step repeated"
    line = rf"resumed at version {start} from memory .*, {cost}, \S+ s after the training stopped"
    assert re.search(line, told), told
    assert "takes its place" not in started.stderr[1], "rank 0 tells it for all"
    assert {r["peeked"] for r in results} == {r["start"] for r in results}
    assert [r["digest"] for r in results] == undisturbed
    assert all(r["report"]["state"] == "protected" for r in results)


def test_ranks_that_join_twice_are_protected(make_job: MakeJob, run: Start, undisturbed: list[str]) -> None:
    """A copy could not be had at first; then the agents bring new ones, asked over the second connection."""
    job = make_job(2, 2)
    run(job, die_at=25).wait(codes=(1,))
    job.requeue(["n1", "n2"])
    started = run(job, fetch_fails=0)
    results = started.wait()
    assert any("cannot be loaded: rank 0: not this time" in text for text in started.stderr)
    assert [r["digest"] for r in results] == undisturbed
    assert all(r["report"]["state"] == "protected" and r["report"]["sealed"][1] >= STEPS - 1 for r in results)


@pytest.mark.parametrize("grow_at", [0, 8])
def test_agents_die_and_get_back_what_others_had_pushed_to_them(
    make_job: MakeJob, run: Start, undisturbed: list[str], grow_at: int, pause: Pause
) -> None:
    """The training stands still meanwhile: no copy comes anew."""
    job = make_job(2, 2)
    options = {"armed": True, "sealed_until": STEPS, "grow_at": grow_at, **pause.at(20)}
    training = run(job, **options, kwargs={**HOST, "scheme": "background"})
    pause.wait(20)
    both_hold(job, 20)
    before = [job.held(node, rank) for node in job.nodes for rank in (0, 1)]
    assert all((1, 20) in stamps and len(stamps) == 2 for stamps in before), before
    for node in job.nodes:
        node.die()
        node.start(again=True)
    until(lambda: [job.held(node, rank) for node in job.nodes for rank in (0, 1)] == before, what="all is back")
    pause.end(20)
    results = training.wait()
    assert [r["digest"] for r in results] == undisturbed
    for r in results:
        assert r["report"]["sealed"][1] >= STEPS - 1 and r["report"]["state"] == "protected", r["report"]
    assert "damaged" not in job.nodes[0].log() + job.nodes[1].log()


def test_a_holder_dies_in_mid_training(make_job: MakeJob, run: Start, undisturbed: list[str]) -> None:
    """Training goes on, the link heals, versions are sealed again."""
    job = make_job(2, 2)
    training = run(job, sleep_s=0.1)
    until(lambda: sealed(job, job.nodes[0]) >= 8, what="the first seals")
    job.nodes[1].die()
    job.nodes[1].start(again=True)
    results = training.wait()
    assert [r["digest"] for r in results] == undisturbed
    assert all(r["report"]["sealed"][1] >= STEPS - 1 for r in results), [r["report"] for r in results]
    assert "protection is degraded" in training.stderr[0] and "protected again" in training.stderr[0]


def test_a_holder_hangs_and_nobody_waits_for_it(make_job: MakeJob, run: Start, undisturbed: list[str]) -> None:
    job = make_job(2, 2)
    training = run(job, sleep_s=0.1)
    until(lambda: sealed(job, job.nodes[0]) >= 8, what="the first seals")
    job.nodes[1].stop(2.0)
    results = training.wait()
    assert [r["digest"] for r in results] == undisturbed
    times = results[0]["report"]["times"]
    assert times["hook_s"] < 6.0, times
    assert all(r["report"]["sealed"][1] >= STEPS - 1 for r in results), [r["report"] for r in results]
