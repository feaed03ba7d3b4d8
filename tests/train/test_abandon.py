"""All is built anew in the same process: the first Checkpointer is given up, the second goes on from memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from waiting import until

import gemini_hpc as gemini

from .agents import RealJob
from .fake_agent import PROTECTED
from .test_checkpointer import wait_armed


class OutOfMemory(RuntimeError):
    pass


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(), nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ckpt = gemini.Checkpointer(self.model, self.optimizer)

    def run(self, stop: int, losses: dict[int, str], *, fails_at: int = 0) -> int:
        first = self.ckpt.resume()
        self.ckpt.restore_generators()
        for step in range(first + 1, stop + 1):
            self.optimizer.zero_grad()
            loss = self.model(torch.rand(4, 8)).square().mean()
            loss.backward()
            if step == fails_at:
                raise OutOfMemory
            self.optimizer.step()
            losses[step] = loss.item().hex()
            self.ckpt.step()
            if step == first + 1:
                wait_armed(self.ckpt)
            elif self.ckpt.report()["state"] in PROTECTED:
                until(lambda: self.ckpt.report()["sealed"][1] == self.ckpt.version, what="sealed")
        return first


def test_the_second_goes_on_where_the_first_was(
    make_agents: Callable[..., RealJob], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole: dict[int, str] = {}
    monkeypatch.delenv("GEMINI_SOCKET", raising=False)
    Training(1).run(12, whole)
    monkeypatch.setenv("GEMINI_SOCKET", make_agents(1, 1).nodes[0].path)
    monkeypatch.setenv("GEMINI_STEP", "1.0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    capfd.readouterr()
    losses: dict[int, str] = {}
    training: Any = Training(1)
    try:
        training.run(12, losses, fails_at=8)
    except OutOfMemory as error:  # its traceback has the training
        assert error.__traceback__ is not None
    training.ckpt.abandon()
    training.ckpt.abandon()
    model = weakref.ref(training.model)
    del training
    until(lambda: gc.collect() >= 0 and model() is None, what="the first one's memory is free")
    second = Training(2)
    assert second.run(12, losses) == 7
    report = second.ckpt.report()
    assert losses == whole and report["state"] == "protected" and not report["unsaved"], report
    second.ckpt.close()
    said = capfd.readouterr().err
    assert "not protected" not in said and "no longer" not in said, said


def test_without_it_the_second_is_told(
    make_agents: Callable[..., RealJob], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMINI_SOCKET", make_agents(1, 1).nodes[0].path)
    monkeypatch.setenv("GEMINI_STEP", "1.0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    first = Training(1)
    Training(2)
    assert "call abandon() on that" in capfd.readouterr().err
    first.ckpt.close()
