"""Optimizers inside others, optimizers that nobody passed, and step() once per micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.train.state.optimizers import list_with_inner

from .fake_agent import FakeJob
from .launch import Run, train
from .test_checkpointer import wait_armed, wait_sealed

MakeJob = Callable[[int, int], FakeJob]


class Sharing(torch.optim.Optimizer):
    """As Accelerate's: everything is the inner one's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Averaging(torch.optim.Optimizer):
    """As SAM and the like: a base with a state of its own, and a state beside that."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, {})
        self.base = [torch.optim.Adam(self.param_groups, **kwargs)]
        self.param_groups = self.base[0].param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base[0].step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def test_what_works_inside_is_found() -> None:
    params = [nn.Parameter(torch.ones(2))]
    adam = torch.optim.Adam(params)
    sharing, averaging = Sharing(adam), Averaging(params)
    assert list_with_inner([adam]) == [adam]
    assert list_with_inner([sharing]) == [sharing], "its state is the inner one's"
    assert list_with_inner([averaging, adam]) == [averaging, averaging.base[0], adam]
    assert list_with_inner([averaging, averaging.base[0]]) == [averaging, averaging.base[0]]


def iterate(
    job: FakeJob, optimizer: Any, given: Any, model: nn.Module, stop: int, seed: int = 0
) -> tuple[int, list[str]]:
    losses = []
    torch.manual_seed(seed)
    with gemini.Checkpointer(model, given) as ckpt:
        start = ckpt.resume()
        for step in range(start + 1, stop + 1):
            loss = (model(torch.rand(4, 3)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            ckpt.step()
            if step == start + 1:
                wait_armed(ckpt)
    return start, losses


@pytest.mark.parametrize("wrapper", ["sharing", "averaging"])
def test_a_wrapped_optimizer_comes_back(job: FakeJob, capfd: pytest.CaptureFixture[str], wrapper: str) -> None:
    def run(seed: int) -> tuple[int, list[str], list[Any]]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        made: Any = Averaging(model.parameters(), lr=0.05)
        if wrapper == "sharing":
            made = Sharing(torch.optim.Adam(model.parameters(), lr=0.05))
        start, losses = iterate(job, made, made, model, 8, seed)
        return start, losses, [p.tolist() for p in model.parameters()]

    job.stop_after(5)
    _, losses, final = run(1)
    wait_sealed(job, 5)
    assert (chosen := job.requeue()) is not None and chosen.version == 5
    assert run(2) == (5, losses[5:], final)
    assert "was not passed" not in capfd.readouterr().err


def test_an_optimizer_that_steps_and_was_not_passed_is_told_once(
    job: FakeJob, capfd: pytest.CaptureFixture[str]
) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    forgotten = torch.optim.Adam(other.parameters(), lr=0.1)

    class Both:
        def zero_grad(self) -> None:
            given.zero_grad()

        def step(self) -> None:
            given.step()
            other(torch.ones(3)).sum().backward()
            forgotten.step()

    iterate(job, Both(), given, model, 4)
    (line,) = [text for text in capfd.readouterr().err.splitlines() if "was not passed" in text]
    assert "a Adam makes steps, but was not passed: its state is not captured" in line


def test_without_a_loader_the_resume_says_what_the_script_has_to_skip(
    job: FakeJob, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.stop_after(4)
    iterate(job, optimizer, optimizer, model, 6)
    assert "no loader" not in capfd.readouterr().err
    assert job.requeue() is not None
    iterate(job, optimizer, optimizer, model, 6)
    assert "no loader was passed: the script itself has to skip 4 steps of data" in capfd.readouterr().err


@pytest.mark.slow
def test_zero_redundancy(make_job: MakeJob) -> None:
    """Its moments are in `optim`, on each rank those of its own parameters."""
    job = make_job(2, 2)
    job.stop_after(7)
    options = {"kind": "ddp", "steps": 12, "zero": True, "kwargs": {"audit": 1}}
    whole = train(job, 2, **options)
    assert whole[0]["report"]["captured"]["optimizers"] == 2
    assert (chosen := job.requeue(lost=(1,))) is not None and chosen.version == 7
    resumed = train(job, 2, seed=9, **options)
    for a, b in zip(whole, resumed, strict=True):
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > 7}
        assert b["digest"] == a["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 2, 3])
def test_step_once_per_micro_batch(make_job: MakeJob, every: int) -> None:
    """Versions at which gradients wait are none; the one after them is sealed before the next optimizer step, and is
    saved whatever version was to be."""
    job = make_job(2, 2)
    run = Run(job, 2, {"kind": "ddp", "steps": 30, "accumulate": 4, "micro_steps": True, "kwargs": {"every": every}})
    told = run.wait()
    assert told[0]["report"]["version"] == 120
    late = told[0]["unsealed_at_gate"]
    assert len(late) == 30 and max(late[8:]) <= (0 if not every else 4 * every), late


@pytest.mark.slow
@pytest.mark.parametrize("how", ["die_at", "die_within"])
def test_step_once_per_micro_batch_and_a_kill(make_job: MakeJob, how: str) -> None:
    """After a whole optimizer step, and among its micro-batches: one is repeated at most, and nothing differs."""
    options = {"kind": "ddp", "steps": 24, "accumulate": 4, "micro_steps": True}
    whole = train(None, 2, **options)
    job = make_job(2, 2)
    Run(job, 2, {**options, "armed": True, how: 15}).wait(codes=(1,))
    completed = 15 if how == "die_at" else 14
    assert (chosen := job.requeue(lost=(1,))) is not None
    assert chosen.version in (4 * (completed - 1), 4 * completed), "four calls make one optimizer step"
    for a, b in zip(whole, train(job, 2, seed=9, **options), strict=True):
        assert b["start"] == chosen.version and b["digest"] == a["digest"]
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if 4 * int(s) > chosen.version}
