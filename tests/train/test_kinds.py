"""Kinds of modules and tensors: what is seen through, what is captured, and what leaves a training unprotected."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.train.state import encode, sharded

from .fake_agent import FakeJob
from .launch import train
from .test_checkpointer import wait_armed, wait_sealed

MakeJob = Callable[[int, int], FakeJob]


@pytest.mark.slow
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


def test_a_part_of_a_dtensor_comes_back_where_something_is_like_it() -> None:
    part = encode.DTensorPart(torch.ones(3), (6,), "(Shard(dim=0),)")
    (again,) = encode.decode(encode.encode([part]))
    assert sharded.has_parts({"a": (again,)}) and not sharded.has_parts({"a": [torch.ones(3)]})
    assert (again.shape, again.placements, again.tensor.tolist()) == ((6,), part.placements, [1.0] * 3)
    with pytest.raises(ValueError, match=r"average\['a'\]\[0\] was a DTensor \(6,\) .*nothing here matches it"):
        sharded.Wholes([]).rebuild({"a": [part]}, {"a": [torch.ones(3)]}, "average")
    plain = {"a": [torch.ones(3)], "b": (1, {2})}
    assert sharded.replace_dtensors(plain) is plain
    with pytest.raises(ValueError, match="an invalid part of a DTensor"):
        encode.decode(b"P\x00\x00\x00\x00")


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
            if step == start + 1:
                wait_armed(ckpt)
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
    model.extra = nn.Parameter(torch.eye(3).to_sparse())
    return model


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_value_that_cannot_be_captured_trains_unprotected(job: FakeJob, capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert run(model, optimizer, 2, extra={"bad": Stateful()})[2]["state"] == "unprotected"
    assert "'extra.bad']['socket'] is a builtins.object" in capfd.readouterr().err


class Sparsely(torch.optim.SGD):
    """Its state has no dense form."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["few"] = torch.eye(3).to_sparse()


@pytest.mark.witness("a training whose state cannot be captured goes on unprotected, and says so in one line")
@pytest.mark.slow
def test_state_that_appears_and_cannot_be_captured_ends_protection(
    job: FakeJob, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(3, 2)
    start, losses, report = run(model, Sparsely(model.parameters(), lr=0.1), 4)
    assert (start, len(losses), report["state"]) == (0, 4, "unprotected")
    said = [line for line in capfd.readouterr().err.splitlines() if "no longer protected" in line]
    assert len(said) == 1 and "optimizer.0.model.weight.few is a Tensor (torch.sparse_coo, cpu)" in said[0], said


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


def saved_and_loaded(before: nn.Module, first: Any, after: nn.Module, second: Any, job: FakeJob) -> None:
    """One step with the one, `edit`ed before it; then resumed with the other."""
    with gemini.Checkpointer(before, first) as ckpt:
        ckpt.resume()
        for step in range(4):
            before(torch.ones(2, 3)).sum().backward()
            first.step()
            ckpt.step()
            if step == 0:
                wait_armed(ckpt)
    wait_sealed(job, 4)
    assert job.requeue() is not None
    with gemini.Checkpointer(after, second) as ckpt:
        assert ckpt.resume() == 4


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = self.inner(x)
        return out


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def test_a_script_module(job: FakeJob) -> None:
    a, b = (torch.jit.script(Scripted()) for _ in range(2))
    saved_and_loaded(a, sgd(a), b, sgd(b), job)
    assert all(torch.equal(b.state_dict()[name], tensor) for name, tensor in a.state_dict().items())
    assert b.seen.item() == 4


class Buffers(nn.Linear):
    """Emptied, of another type, under another name: all by assignment."""

    def __init__(self, *, edit: bool) -> None:
        super().__init__(3, 2)
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("rate", torch.tensor(0))
        self.register_buffer("short", torch.ones(2))
        self.edit = edit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edit and self.mask is not None:
            self.mask, self.rate = None, torch.tensor(0.25)
            del self.short
            self.register_buffer("long", torch.full((5,), 7.0))
        return super().forward(x)


def test_buffers_that_are_emptied_retyped_and_renamed(job: FakeJob) -> None:
    a, b = Buffers(edit=True), Buffers(edit=False)
    saved_and_loaded(a, sgd(a), b, sgd(b), job)
    assert b.mask is None and b.rate.item() == 0.25
    assert b.get_buffer("long").tolist() == [7.0] * 5
    assert dict(b.named_buffers()).keys() == dict(a.named_buffers()).keys()


def two() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for p in model[0].parameters():
        p.requires_grad_(False)
    return model, model[0], torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("how", ["group", "append"])
def test_what_is_unfrozen_in_mid_training_is_trained_after_the_resume(job: FakeJob, how: str) -> None:
    a, frozen, first = two()
    b, again, second = two()

    def unfreeze(*_: Any) -> None:
        if not frozen.weight.requires_grad:
            for p in frozen.parameters():
                p.requires_grad_(True)
            if how == "group":
                first.add_param_group({"params": list(frozen.parameters()), "lr": 0.5})
            else:
                first.param_groups[0]["params"] += list(frozen.parameters())

    a.register_forward_pre_hook(unfreeze)
    saved_and_loaded(a, first, b, second, job)
    assert all(p.requires_grad for p in again.parameters())
    assert [len(g["params"]) for g in second.param_groups] == [len(g["params"]) for g in first.param_groups]
    assert [g["lr"] for g in second.param_groups] == [g["lr"] for g in first.param_groups]
    for model, optimizer in ((a, first), (b, second)):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


class Counting(torch.optim.SGD):
    """Keeps a number under a name, as some do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["k"] = self.state.get("k", 0) + 1  # type: ignore[index]
        super().step()


def test_what_an_optimizer_keeps_under_a_name(job: FakeJob) -> None:
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    first, second = Counting(a.parameters(), lr=0.1), Counting(b.parameters(), lr=0.1)
    saved_and_loaded(a, first, b, second, job)
    assert second.state["k"] == first.state["k"] == 4  # type: ignore[index]


class Pair(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x))
        return out


def test_what_was_tied_and_is_not_any_more_is_loaded_twice(job: FakeJob) -> None:
    a, b = Pair(tied=True), Pair(tied=False)
    plain = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b)]
    saved_and_loaded(a, plain[0], b, plain[1], job)
    assert torch.equal(b.one.weight, a.one.weight) and torch.equal(b.two.weight, a.one.weight)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["evaluate_first", "evaluate_unbuilt"])
def test_what_a_forward_has_gathered_is_not_used_after_the_resume(make_job: MakeJob, at: str) -> None:
    """Before resume(), and before the checkpointer is made: FSDP2 leaves the root's parameters gathered."""
    job = make_job(2, 2)
    job.stop_after(7)
    options = {"kind": "fsdp2", "steps": 12, at: True}
    whole = train(job, 2, **options)
    assert (chosen := job.requeue(lost=(1,))) is not None and chosen.version == 7
    resumed = train(job, 2, seed=9, **options)
    assert [r["digest"] for r in resumed] == [r["digest"] for r in whole]
    told = [json.loads(event.detail) for event in job.saw("resumed")]
    assert [t["shards"] for t in told] == [1, 1], "each rank loads its own, and counts of steps with it"
