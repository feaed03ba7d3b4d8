"""An object of the training's whose state_dict() raises now and then: that costs the version, and is told once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini

from .fake_agent import PROTECTED, FakeJob
from .test_checkpointer import wait_armed, wait_sealed


class Replay:
    """A buffer that cannot be read while it is being filled."""

    def __init__(self, filling: Collection[int]) -> None:
        self.filling, self.step = filling, 0
        self.values = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        if self.step in self.filling:
            raise KeyError(f"episode {self.step}")
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def run(job: FakeJob, filling: Collection[int], *, grows_at: int = 0) -> tuple[dict[str, Any], list[int]]:
    model, replay = nn.Linear(4, 4), Replay(filling)
    optimizer = torch.optim.AdamW(model.parameters())
    with gemini.Checkpointer(model, optimizer, extra={"replay": replay}) as ckpt:
        ckpt.resume()
        for step in range(1, 11):
            optimizer.zero_grad()
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
            replay.step = step
            if step == grows_at:
                replay.values = torch.zeros(40_000)
            ckpt.step()
            if ckpt.report()["captured"]["own_tensors"]:
                wait_armed(ckpt)
            if step > 6 and step not in filling:
                wait_sealed(job, step)
        return ckpt.report(), [seal.version for seal in job.seals]


@pytest.mark.parametrize("filling", [{1}, {5}, {1, 2, 5, 6}], ids=str)
def test_protection_goes_on_with_the_next_version(
    job: FakeJob, capfd: pytest.CaptureFixture[str], filling: set[int]
) -> None:
    report, sealed = run(job, filling)
    assert report["state"] in PROTECTED, report
    assert not filling & set(sealed) and sealed[-1] == 10
    assert report["unsaved"]["skipped"] >= len(filling), report
    lines = capfd.readouterr().err.splitlines()
    said = [line for line in lines if "gemini-hpc" in line and "protected since step" not in line]
    assert len(said) == 1, said
    assert "state_dict() of extra.replay has raised KeyError at test_state_dict_raises.py:" in said[0]


def test_also_where_the_state_is_dealt_out_anew(job: FakeJob, capfd: pytest.CaptureFixture[str]) -> None:
    """A large tensor appears, and the object cannot be read when its ranks would plan anew."""
    report, sealed = run(job, {6}, grows_at=5)
    assert report["state"] in PROTECTED, report
    assert 6 not in sealed and sealed[-1] == 10
    assert "no longer protected" not in capfd.readouterr().err
