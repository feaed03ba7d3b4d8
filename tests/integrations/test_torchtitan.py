"""torchtitan's checkpoint manager over the agents' memory, with torchtitan's optimizers, schedulers and data loader.
Its trainer needs a GPU's packages: the program here calls the manager in the trainer's order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.train.agents import RealJob

from .conftest import Launch

pytestmark = pytest.mark.slow

STEPS, DIED = 14, 9
MakeJob = Callable[..., RealJob]
Train = Callable[..., Any]


@pytest.fixture
def train(launch: Launch, tmp_path: Path) -> Train:
    program = "tests.integrations.torchtitan_program"
    return partial(launch, program=program, steps=STEPS, config={"disk": False}, folder=str(tmp_path / "dump"))


def goes_on_alike(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for a, b in zip(whole, resumed, strict=True):
        assert b["loaded"] and b["start"] in (DIED - 1, DIED), "one step repeated at most"
        assert b["losses"] == {step: loss for step, loss in a["losses"].items() if int(step) > b["start"]}
        assert (b["digest"], b["tokens"]) == (a["digest"], a["tokens"])


def test_all_trainers_are_killed(make_job: MakeJob, train: Train) -> None:
    whole = train(None, 2, parts=2).wait()
    job = make_job(2, 2)
    train(job, 2, parts=2, die_at=DIED).wait(codes=(3,))
    job.requeue(["n1", "n2"])
    run = train(job, 2, parts=2, seed=5)
    resumed = run.wait()
    goes_on_alike(whole, resumed)
    assert {r["protected"] for r in resumed} == {"protected"}
    assert "not passed" not in "".join(run.stderr), run.stderr


def test_a_node_is_lost_with_its_memory(make_job: MakeJob, train: Train) -> None:
    whole = train(None, 2).wait()
    job = make_job(2, 2)
    train(job, 2, die_at=DIED).wait(codes=(3,))
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    goes_on_alike(whole, train(job, 2, seed=5).wait())


def test_an_error_of_the_training_leaves_the_copies(make_job: MakeJob, train: Train) -> None:
    """torchtitan closes the manager then, too."""
    whole = train(None, 2).wait()
    job = make_job(2, 2)
    train(job, 2, raise_at=DIED).wait(codes=(1,))
    job.requeue(["n1", "n2"])
    goes_on_alike(whole, train(job, 2, seed=5).wait())


def test_without_memory_the_disk_serves(train: Train) -> None:
    """As without us: torchtitan keeps no generators, so what follows has other dropout."""
    options = {"interval": 4, "config": {"disk": True}}
    train(None, 2, die_at=DIED, **options).wait(codes=(3,))
    resumed = train(None, 2, seed=5, **options).wait()
    assert [(r["loaded"], r["start"], r["tokens"]) for r in resumed] == [(True, 8, STEPS * 4 * 8)] * 2


def test_memory_goes_before_the_disk(make_job: MakeJob, train: Train) -> None:
    options = {"interval": 4, "config": {"disk": True}}
    job = make_job(2, 2)
    train(job, 2, die_at=DIED + 1, **options).wait(codes=(3,))
    job.requeue(["n1", "n2"])
    assert {r["start"] for r in train(job, 2, seed=5, **options).wait()} <= {DIED, DIED + 1}
