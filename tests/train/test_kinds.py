"""Kinds of modules and tensors: what is seen through, what is captured, and what leaves a training unprotected."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import gemini_hpc as gemini
from gemini_hpc.train import encode, sharded

from .fake_agent import FakeJob
from .launch import train
from .test_checkpointer import wait_sealed

MakeJob = Callable[[int, int], FakeJob]


@pytest.fixture
def job(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    job = make_job(1, 1)
    monkeypatch.setenv("GEMINI_SOCKET", job.nodes[0].path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield job


@pytest.mark.parametrize("wrap", ["checkpoint", "compile"])
def test_a_wrapper_below_fully_shard_has_no_name(make_job: MakeJob, wrap: str) -> None:
    """A run with activation checkpointing, or compiled, goes on without; and the other way round."""
    job = make_job(2, 2)
    job.stop_after(7)
    options = {"kind": "fsdp2", "steps": 12, "average": True}
    whole = train(job, 2, **options, wrap=wrap)
    assert (chosen := job.requeue(lost=(1,))) is not None and chosen.version == 7
    resumed = train(job, 2, seed=9, **options)
    for a, b in zip(whole, resumed, strict=True):
        assert b["start"] == 7
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > 7}
        assert b["digest"] == a["digest"], "also the average of sharded parameters, which is no module"


def test_a_part_of_a_dtensor_comes_back_into_one_of_the_same_shape_only() -> None:
    part = encode.decode(encode.encode({"a": [torch.ones(3)]}))
    assert not sharded.has_parts(part)
    saved = {"a": [encode.Part(torch.ones(3))]}
    assert sharded.has_parts(saved)
    with pytest.raises(ValueError, match=r"average\['a'\]\[0\] was a DTensor in the saved run, and is none now"):
        sharded.whole(saved, {"a": [torch.ones(3)]}, "average")
    with pytest.raises(ValueError, match="is none now"):
        sharded.whole(saved, {}, "average")
    with pytest.raises(ValueError, match="no tensor"):
        encode.decode(b"PN")


class Marked(nn.Parameter):
    """As libraries make them, to keep something beside the values."""


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Marked(torch.rand(3, 2))
        self.register_buffer("wide", torch.zeros(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wide = (self.wide + x.detach().mean()).mean().expand(4)
        return x @ self.weight + self.wide[:2]


def run(model: nn.Module, optimizer: torch.optim.Optimizer, stop: int, **more: Any) -> tuple[int, list[str], Any]:
    losses = []
    with gemini.Checkpointer(model, optimizer, **more) as ckpt:
        start = ckpt.resume()
        ckpt.restore_generators()
        for step in range(start + 1, stop + 1):
            loss = (model(torch.rand(4, 3)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            ckpt.step()
            deadline = time.monotonic() + 5
            while step == start + 1 and not ckpt._armed and time.monotonic() < deadline:
                time.sleep(0.01)
        report = ckpt.report()
    return start, losses, report


def test_a_class_of_parameters_and_an_expanded_buffer(job: FakeJob) -> None:
    def once(seed: int) -> tuple[int, list[str], Any]:
        torch.manual_seed(seed)
        model = Odd()
        return run(model, torch.optim.Adam(model.parameters(), lr=0.05), 9)

    job.stop_after(5)
    _, losses, _ = once(1)
    wait_sealed(job, 5)
    assert job.requeue() is not None
    assert once(2)[:2] == (5, losses[5:])


def sparse_model() -> nn.Module:
    model = nn.Linear(3, 2)
    model.extra = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2)),
            "model.1.weight has no size before the first forward",
        ),
        (sparse_model, "model.extra is a Parameter (torch.sparse_coo, cpu)"),
    ],
    ids=["lazy", "sparse"],
)
@pytest.mark.parametrize("agent", [True, False])
def test_what_cannot_be_captured_trains_unprotected(
    job: FakeJob,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    make: Callable[[], nn.Module],
    why: str,
    agent: bool,
) -> None:
    if not agent:
        monkeypatch.delenv("GEMINI_SOCKET")
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    start, losses, report = run(model, optimizer, 3)
    assert (start, len(losses), report["state"]) == (0, 3, "unprotected")
    said = [line for line in capfd.readouterr().err.splitlines() if "not protected" in line]
    assert len(said) == 1 and (why in said[0]) == agent, said


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {"socket": object()}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_a_value_that_cannot_be_captured_trains_unprotected(job: FakeJob, capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert run(model, optimizer, 2, extra={"bad": Stateful()})[2]["state"] == "unprotected"
    assert "'extra.bad']['socket'] is a builtins.object" in capfd.readouterr().err


class InTwo(torch.optim.SGD):
    """As 8-bit optimizers: state of a tensor class that is made of other tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["two"] = TwoTensor(torch.ones(3), torch.ones(3))


def test_state_that_appears_and_cannot_be_captured_ends_protection(
    job: FakeJob, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(3, 2)
    start, losses, report = run(model, InTwo(model.parameters(), lr=0.1), 4)
    assert (start, len(losses), report["state"]) == (0, 4, "unprotected")
    said = [line for line in capfd.readouterr().err.splitlines() if "no longer protected" in line]
    assert len(said) == 1 and "optimizer.0.model.weight.two is a TwoTensor" in said[0], said


def test_generators_are_restored_once_more_when_asked(job: FakeJob) -> None:
    """A loader of the script's own draws from the global generators after resume()."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.stop_after(5)
    run(model, optimizer, 9)
    wait_sealed(job, 5)
    assert job.requeue() is not None
    ckpt = gemini.Checkpointer(model, optimizer)
    ckpt.restore_generators()  # nothing has been restored yet
    assert ckpt.resume() == 5
    drawn = [torch.rand(3).tolist(), random.random(), np.random.rand()]
    ckpt.restore_generators()
    assert [torch.rand(3).tolist(), random.random(), np.random.rand()] == drawn
    ckpt.close()


def test_peek_says_what_resume_is_about_to_restore(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert gemini.peek() == 0
    job.stop_after(5)
    run(model, optimizer, 9)
    wait_sealed(job, 5)
    assert job.requeue() is not None
    assert gemini.peek() == gemini.peek() == 5
    with gemini.Checkpointer(model, optimizer) as ckpt:
        assert ckpt.resume() == 5
    monkeypatch.delenv("GEMINI_SOCKET")
    assert gemini.peek() == 0
