"""Schedulers and scalers that exist and were not passed are told of once; not so what a passed object holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import gemini_hpc as gemini

from .fake_agent import FakeJob
from .launch import Run
from .test_checkpointer import wait_armed

Told = pytest.CaptureFixture[str]


class Holder:
    """An object of the user's that hands out what it holds."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self.held.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, item in self.held.items():
            item.load_state_dict(state[name])


def lines(job: FakeJob, capfd: Told, model: nn.Module, optimizer: Any, *given: Any, **options: Any) -> list[str]:
    """Return the lines of a training of three steps on objects that were not passed."""
    with gemini.Checkpointer(model, optimizer, *given, **options) as ckpt:
        ckpt.resume()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            ckpt.step()
        wait_armed(ckpt)
    return [line for line in capfd.readouterr().err.splitlines() if "not passed" in line]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_scheduler_that_was_not_passed_is_told_once(job: FakeJob, capfd: Told) -> None:
    model, optimizer = made()
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 9)
    (line,) = lines(job, capfd, model, optimizer)
    assert "a CosineAnnealingLR of this training's optimizer was not passed: it is not captured" in line
    del scheduler


def test_of_schedulers_inside_another_the_outer_one_is_told(job: FakeJob, capfd: Told) -> None:
    model, optimizer = made()
    inner = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    outer = lr_scheduler.SequentialLR(optimizer, inner, [2])
    (line,) = lines(job, capfd, model, optimizer)
    assert "a SequentialLR of this" in line
    assert lines(job, capfd, model, optimizer, outer) == []


def test_a_scheduler_that_waits_for_a_metric_is_one(job: FakeJob, capfd: Told) -> None:
    model, optimizer = made()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    (line,) = lines(job, capfd, model, optimizer)
    assert "a ReduceLROnPlateau of this" in line
    del scheduler


def test_a_scaler_that_was_not_passed_is_told(job: FakeJob, capfd: Told) -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    (line,) = lines(job, capfd, model, optimizer)
    assert "a GradScaler was not passed: its scale is not captured" in line
    assert lines(job, capfd, model, optimizer, None, scaler) == []


def test_a_scaler_that_is_switched_off_has_no_state(job: FakeJob, capfd: Told) -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert lines(job, capfd, model, optimizer) == []
    del scaler


def test_what_a_passed_object_holds_is_its_own(job: FakeJob, capfd: Told) -> None:
    model, optimizer = made()
    holder = Holder(scheduler=lr_scheduler.ExponentialLR(optimizer, 0.9), scaler=torch.amp.GradScaler("cpu"))
    assert lines(job, capfd, model, optimizer, extra={"loop": holder}) == []


def test_what_belongs_to_others_is_not_told(job: FakeJob, capfd: Told) -> None:
    """Another training's optimizer, scheduler and scaler, and a scheduler that nobody has any more."""
    other, others = made()
    scheduler, scaler = lr_scheduler.ExponentialLR(others, 0.9), torch.amp.GradScaler("cpu")
    second = gemini.Checkpointer(other, others, scheduler, scaler, name="other")
    others.step()
    model, optimizer = made()
    gone = lr_scheduler.ExponentialLR(optimizer, 0.9)
    gone.itself = gone  # type: ignore[attr-defined]
    del gone
    assert lines(job, capfd, model, optimizer) == []
    second.close()


@pytest.mark.slow
def test_what_several_ranks_have_to_say_is_said_once(make_job: Callable[[int, int], FakeJob]) -> None:
    """The lowest rank says it, with the numbers of those that have it; each has it in its report."""
    run = Run(make_job(2, 2), 3, {"program": "tests.train.forgetful", "counts_on": 1, "kwargs": {}})
    found = [result["report"]["findings"] for result in run.wait()]
    alike = ["a ExponentialLR of this training's", "step() at version 1 without an optimizer step"]
    for said in alike:
        assert [text.count(f"ranks 0, 1, 2: {said}") for text in run.stderr] == [1, 0, 0], run.stderr
        assert [text.count(said) for text in run.stderr] == [1, 0, 0]
        assert [any(said in sentence for sentence in findings) for findings in found] == [True] * 3
    said = "rank 1: the state_dict() of optimizer 0 (Counting) also has count"
    assert [text.count(said) for text in run.stderr] == [0, 1, 0], run.stderr
