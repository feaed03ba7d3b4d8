"""Optimizers that are given a closure: where the training waits for its copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini

from .fake_agent import FakeJob
from .test_checkpointer import wait_armed, wait_sealed


def run(seed: int, behind: bool, stop: int) -> tuple[int, list[str], list[str]]:
    """(resumed from, losses, for each closure whether the wait was over when it began)."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses: list[str] = []
    waited: list[str] = []
    with gemini.Checkpointer(model, optimizer) as ckpt:
        ckpt.gate_in_closure = behind

        def closure() -> Any:
            waited.append("before" if ckpt._gate.passed else "behind")
            optimizer.zero_grad()
            loss = (model(torch.rand(8, 3)) - 1).square().mean()
            loss.backward()
            losses.append(loss.item().hex())
            return loss

        start = ckpt.resume()
        for step in range(start + 1, stop + 1):
            optimizer.step(closure=closure)
            assert ckpt._gate.passed or step == start + 1
            ckpt.step()
            if step == start + 1:
                wait_armed(ckpt)
    return start, losses, waited


@pytest.mark.parametrize("behind", [False, True])
def test_the_wait_is_where_it_was_put(job: FakeJob, behind: bool) -> None:
    """What is written by then is captured all the same: the resumed losses are those that were to come."""
    job.stop_after(5)
    _, losses, waited = run(1, behind, 9)
    assert set(waited[2:]) == {"behind" if behind else "before"}
    wait_sealed(job, 5)
    assert job.requeue() is not None
    assert run(2, behind, 9)[:2] == (5, losses[5:])
