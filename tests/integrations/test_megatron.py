"""Megatron-Core's sharded state dicts over the agents' memory: GPTModel, Megatron's DDP and distributed optimizer, on
CPUs over gloo. What that leaves out is in docs/integrations.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.train.agents import RealJob

from .conftest import Launch

pytestmark = pytest.mark.slow

STEPS, DIED = 9, 5
MakeJob = Callable[..., RealJob]
Train = Callable[..., Any]


@pytest.fixture
def train(launch: Launch) -> Train:
    return partial(launch, program="tests.integrations.megatron_program", steps=STEPS)


def goes_on_alike(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for a, b in zip(whole, resumed, strict=True):
        assert (b["start"], b["own"]) == (DIED, b["rank"])
        assert b["losses"] == {step: loss for step, loss in a["losses"].items() if int(step) > DIED}
        assert b["digest"] == a["digest"]
        assert b["saved"] == list(range(DIED + 1, STEPS + 1))


def test_all_trainers_are_killed(make_job: MakeJob, train: Train) -> None:
    options = {"kind": "dp_reshardable", "tensor": 2}
    whole = train(None, 2, **options).wait()
    job = make_job(2, 2)
    train(job, 2, die_at=DIED, **options).wait(codes=(3,))
    job.requeue(["n1", "n2"])
    goes_on_alike(whole, train(job, 2, seed=5, **options).wait())


def test_a_node_is_lost_with_its_memory(make_job: MakeJob, train: Train) -> None:
    whole = train(None, 2).wait()
    job = make_job(2, 2)
    train(job, 2, die_at=DIED).wait(codes=(3,))
    job.all["n1"].die()
    job.requeue(["n2", "n3"])
    goes_on_alike(whole, train(job, 2, seed=5).wait())


@pytest.mark.parametrize(("kind", "before", "after"), [("dp_reshardable", 2, 1), ("fully_reshardable", 1, 2)])
def test_another_number_of_ranks_loads_it(
    make_job: MakeJob, train: Train, kind: str, before: int, after: int
) -> None:
    job = make_job(1, 1)
    saved = train(job, before, kind=kind, die_at=DIED).wait(codes=(3,))
    job.requeue(["n1"])
    loaded = train(job, after, kind=kind, seed=5, steps=DIED + 1, die_at=DIED + 1).wait(codes=(3,))
    assert {r["start"] for r in loaded} == {DIED}
    assert {r["loaded"] for r in loaded} == {r["values"] for r in saved}
    assert {r["own"] for r in loaded} == {0}


def test_without_an_agent_one_line(train: Train) -> None:
    run = train(None, 2)
    assert [r["saved"] for r in run.wait()] == [[0] * STEPS] * 2
    assert "".join(run.stderr).count("gemini-hpc: ") == 1
