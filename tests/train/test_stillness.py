"""Weights that change without an optimizer step, as LOMO's fused backward pass writes them: told, never sealed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.train.state.stillness import Stillness

from .fake_agent import PROTECTED, FakeJob
from .test_checkpointer import wait_armed, wait_sealed

Told = pytest.CaptureFixture[str]
LINE = "weights change, and no optimizer has made a step since the last step()"


class Fused(torch.optim.Optimizer):
    """Writes each weight in the backward pass, and keeps no gradient. `step` may be called in its place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.hooks = [p.register_post_accumulate_grad_hook(self.write) for p in model.parameters()]

    def write(self, p: Any) -> None:
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None


def iterate(ckpt: gemini.Checkpointer, model: nn.Module, optimizer: Any = None) -> None:
    (model(torch.rand(4, 3)) - 1).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    ckpt.step()


def test_a_fused_backward_pass_is_told_at_once_and_once(job: FakeJob, capfd: Told) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with gemini.Checkpointer(model, Fused(model)) as ckpt:
        ckpt.resume()
        for _ in range(2):
            iterate(ckpt, model)
        (line,) = [text for text in capfd.readouterr().err.splitlines() if LINE in text]
        assert line.startswith("gemini-hpc: rank 0: step() at version 2: ")
        for _ in range(150):
            iterate(ckpt, model)
        assert ckpt.report()["state"] == "unprotected" and LINE in " ".join(ckpt.report()["findings"])
    assert LINE not in capfd.readouterr().err
    assert job.sealed is None


def test_a_second_stage_with_a_fused_backward_pass_is_not_sealed(job: FakeJob, capfd: Told) -> None:
    """The first one of a row is taken: until the next step() it cannot be known."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gemini.Checkpointer(model, optimizer, seal_timeout_s=0.2) as ckpt:
        ckpt.resume()
        iterate(ckpt, model, optimizer)
        wait_armed(ckpt)
        iterate(ckpt, model, optimizer)
        wait_sealed(job, 2)
        fused = Fused(model)
        for _ in range(20):
            iterate(ckpt, model)
        assert ckpt.report()["unsaved"]["unstepped"] >= 18 and ckpt.report()["state"] == "unprotected"
        for hook in fused.hooks:
            hook.remove()
        iterate(ckpt, model, optimizer)
        wait_sealed(job, 23)
        assert ckpt.report()["state"] in PROTECTED
    assert capfd.readouterr().err.count(LINE) == 1
    assert not {seal.version for seal in job.seals} & set(range(4, 23))


def test_micro_batches_and_a_scaler_that_skips_are_no_such_thing(job: FakeJob, capfd: Told) -> None:
    model = nn.Linear(3, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", growth_interval=1)
    with gemini.Checkpointer(model, optimizer, scaler=scaler) as ckpt:
        ckpt.resume()
        for step in range(12):
            poison = float("inf") if step % 5 == 4 else 1.0
            scaler.scale(model(torch.rand(4, 3)).sum() * poison).backward()
            if step % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            ckpt.step()
    assert LINE not in capfd.readouterr().err


def test_nobody_looks_for_ever() -> None:
    weights = [nn.Parameter(torch.ones(40)) for _ in range(40)]
    still = Stillness()
    assert not any(still.detect_change(weights) for _ in range(50))
    weights[0].data.add_(1)
    assert still.detect_change(weights) and not still.detect_change(weights)
    still.forget()
    weights[0].data.add_(1)
    assert not still.detect_change(weights), "an optimizer wrote that"
    assert not any(still.detect_change(weights) for _ in range(100))
    weights[0].data.add_(1)
    assert not still.detect_change(weights)


def test_weights_of_other_kinds_are_passed_over() -> None:
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    assert not Stillness().detect_change([sparse, nn.Parameter(torch.empty(0)), torch.ones(2)])
