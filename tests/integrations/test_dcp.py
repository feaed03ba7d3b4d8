"""torch.distributed.checkpoint over the agents' memory: kills, a lost node, other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.train.agents import RealJob

from .conftest import Launch

STEPS, DIED = 14, 9
MakeJob = Callable[..., RealJob]
Train = Callable[..., Any]


@pytest.fixture
def train(launch: Launch) -> Train:
    return partial(launch, program="tests.integrations.dcp_program", steps=STEPS)


def goes_on_alike(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for a, b in zip(whole, resumed, strict=True):
        assert b["start"] == DIED
        assert b["losses"] == {step: loss for step, loss in a["losses"].items() if int(step) > DIED}
        assert b["digest"] == a["digest"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_all_trainers_are_killed(make_job: MakeJob, train: Train, kind: str, asynchronous: bool) -> None:
    options = {"kind": kind, "asynchronous": asynchronous, "labels": True}
    whole = train(None, 2, **options).wait()
    job = make_job(2, 2)
    train(job, 2, die_at=DIED, **options).wait(codes=(1,))
    job.requeue(["n1", "n2"])
    run = train(job, 2, seed=5, **options)
    resumed = run.wait()
    goes_on_alike(whole, resumed)
    assert {r["id"] for r in resumed} == {f"step-{DIED}"}
    assert "gemini-hpc" not in "".join(run.stderr), run.stderr
    if not asynchronous:
        assert [r["saved"] for r in resumed] == [list(range(DIED + 1, STEPS + 1))] * 2
