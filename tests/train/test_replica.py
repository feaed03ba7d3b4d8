"""Replicated state is not sent: a holder fills its slot from its own tensors."""

from __future__ import annotations

from typing import Any

import pytest
from waiting import until

from .conftest import HOST, STEPS, Pause
from .launch import train
from .test_host import MakeJob, Start, both_hold, sealed

pytestmark = pytest.mark.slow

DDP: dict[str, Any] = {"kind": "ddp", "width": 128, "norm": "layer"}
SEALED: dict[str, Any] = {"armed": True, "sealed_until": STEPS}  # each version before the next step
SLOW: dict[str, Any] = {"sleep_s": 0.02}  # where a version is never sealed


def share(result: dict[str, Any]) -> float:
    """Bytes on the network, of what all versions would have taken."""
    versions, shard = result["report"]["versions"], result["report"]["captured"]["own_tensor_bytes"]
    return float(versions["sent_bytes"] / (shard * versions["saved"]))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {},
            marks=pytest.mark.witness("replicated state is not sent, and fills a copy that was lost"),
            id="ddp",
        ),
        pytest.param({"kind": "fsdp2"}, id="fsdp2"),
        pytest.param({"kind": "hsdp"}, id="hsdp"),
        pytest.param({"norm": "batch"}, id="batch"),
    ],
)
def test_ddp_sends_what_is_not_replicated_and_comes_back(
    make_agents: MakeJob, start: Start, options: dict[str, Any]
) -> None:
    settings = {**DDP, **SEALED, **options}
    whole = train(None, 2, steps=STEPS, **settings)
    job = make_agents(2, 2)
    start(job, die_at=25, **settings).wait(codes=(1,))
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    results = start(job, **settings).wait()
    assert {r["start"] for r in results} in ({24}, {25}), "one step repeated at most"
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]
    for result in results:
        report = result["report"]
        assert report["state"] == "protected" and not report["versions"]["void"], report
        assert not [line for line in report["findings"] if "differs" in line], report["findings"]
        assert share(result) > 0.9 if options.get("kind") == "fsdp2" else share(result) < 0.4, "a few come as a whole"


@pytest.mark.parametrize("kind", ["hsdp", "ddp"])
def test_replicas_that_are_not_alike_from_the_beginning(make_agents: MakeJob, start: Start, kind: str) -> None:
    """HSDP does not make them alike, DDP does: what differs is each rank's own."""
    settings = {**DDP, **SLOW, "kind": kind, "unlike": True}
    whole = train(None, 2, steps=STEPS, **settings)
    assert (whole[0]["digest"] == whole[1]["digest"]) is (kind == "ddp")
    job = make_agents(2, 2)
    start(job, die_at=25, **settings).wait(codes=(1,))
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    results = start(job, **settings).wait()
    assert {r["start"] for r in results} in ({24}, {25})
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]


def test_replicas_that_differ_cost_a_version_and_are_told(make_agents: MakeJob, start: Start) -> None:
    """Local steps: the digest finds the first version in which they differ, which is never sealed."""
    settings = {**DDP, **SLOW, "apart_from": 15, "steps": STEPS}
    whole = train(None, 2, **settings)
    job = make_agents(2, 2)
    started = start(job, die_at=35, **settings)
    reports = [r["report"] for r in started.wait(codes=(1,))]
    told = [line for text in started.stderr for line in text.splitlines() if "differs" in line]
    assert any("what is replicated here is not what rank" in line for line in told), started.stderr
    assert any("new plan" in line for report in reports for line in report["findings"])
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    results = start(job, **settings).wait()
    assert {r["start"] for r in results} in ({34}, {35})
    assert [r["digest"] for r in results] == [r["digest"] for r in whole], "each rank has its own back"


def test_one_element_that_differs_is_found_and_its_tensor_named(make_agents: MakeJob, start: Start) -> None:
    """Memory that has failed, say: the digest finds it, in whatever element, and every rank keeps what it has."""
    settings = {**DDP, **SLOW, "flip_at": 15, "steps": STEPS}
    whole = train(None, 2, **settings)
    job = make_agents(2, 2)
    started = start(job, die_at=35, **settings)
    reports = [r["report"] for r in started.wait(codes=(1,))]
    for report in reports:
        (planned,) = [line for line in report["findings"] if "new plan" in line]
        assert "each rank saves its own: model.blocks.1.weight" in planned and "model.blocks.0" not in planned
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    results = start(job, **settings).wait()
    assert {r["start"] for r in results} in ({34}, {35})
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]


def test_an_agent_that_dies_in_between(make_agents: MakeJob, start: Start, pause: Pause) -> None:
    job = make_agents(2, 2)
    training = start(job, **DDP, **SEALED, **pause.at(20), kwargs={**HOST, "scheme": "background"})
    pause.wait(20)
    both_hold(job, 20)
    job.nodes[1].die()
    job.nodes[1].start(again=True)
    until(lambda: sealed(job, job.nodes[1]) >= 20, what="the successor knows of the seal")
    pause.end(20)
    results = training.wait()
    assert [r["digest"] for r in results] == [r["digest"] for r in train(None, 2, steps=STEPS, **DDP)]
    both_hold(job, STEPS)
