"""Tensors that are made of other tensors: optimizer states of torchao, and a parameter of two tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchao.optim
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import gemini_hpc as gemini
from gemini_hpc.train.state import inner
from gemini_hpc.train.state.modules import UnsupportedStateError
from gemini_hpc.train.state.tree import StateTree

from .fake_agent import PROTECTED, FakeJob
from .launch import train
from .test_checkpointer import wait_armed, wait_sealed

MakeJob = Callable[[int, int], FakeJob]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its optimizers' steps, which takes half a minute here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state_of(optimizer: torch.optim.Optimizer) -> list[bytes]:
    found = []
    for values in optimizer.state.values():
        for value in values.values():
            found += (
                [bits(part) for _, part in inner.list_parts(value)] if inner.is_composed(value) else [bits(value)]
            )
    return found


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, stop: int, **more: Any
) -> tuple[int, list[str], list[bytes], Any]:
    losses = []
    with gemini.Checkpointer(model, optimizer, **more) as ckpt:
        start = ckpt.resume()
        ckpt.restore_generators()
        for step in range(start + 1, stop + 1):
            loss = (model(torch.rand(4, 64)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            ckpt.step()
            if step == start + 1:
                wait_armed(ckpt)
        report = ckpt.report()
    return start, losses, [*map(bits, model.parameters()), *state_of(optimizer)], report


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_optimizer_states_come_back(
    job: FakeJob, uncompiled: None, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """Made anew by a process whose optimizer has made no step yet, and filled, bit for bit."""

    def once(seed: int) -> tuple[int, list[str], list[bytes], Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        optimizer = getattr(torchao.optim, kind)(model.parameters(), lr=0.01)
        found = run(model, optimizer, 9)
        quantized = [v for values in optimizer.state.values() for v in values.values() if inner.is_composed(v)]
        assert len(quantized) == 4, "both moments of both matrices"
        return found

    job.stop_after(5)
    _, losses, state, report = once(1)
    assert report["state"] in PROTECTED and not report["captured"]["eager"], report
    wait_sealed(job, 5)
    assert job.requeue() is not None
    start, again, state_again, _ = once(2)
    assert (start, again) == (5, losses[5:]) and state_again == state
    assert "not protected" not in capfd.readouterr().err


@pytest.mark.slow
def test_quantized_optimizer_states_of_two_ranks(make_job: MakeJob) -> None:
    """Dealt out between the ranks, a node lost."""
    job = make_job(2, 2)
    job.stop_after(7)
    options = {"kind": "ddp", "width": 64, "steps": 12, "torchao": "AdamW8bit", "kwargs": {"seal_timeout_s": 20.0}}
    whole = train(job, 2, **options)
    assert (chosen := job.requeue(lost=(1,))) is not None and chosen.version == 7
    resumed = train(job, 2, seed=9, **options)
    for a, b in zip(whole, resumed, strict=True):
        assert b["start"] == 7 and b["digest"] == a["digest"]
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > 7}
        assert a["report"]["captured"]["own_tensors"] and b["report"]["state"] == "protected"


@pytest.mark.slow
def test_quantized_optimizer_states_of_sharded_parameters(make_job: MakeJob) -> None:
    """FSDP2: DTensors around them, each rank's own."""
    job = make_job(2, 2)
    job.stop_after(7)
    options = {"kind": "fsdp2", "width": 128, "steps": 12, "torchao": "AdamW8bit", "kwargs": {"seal_timeout_s": 20.0}}
    whole = train(job, 2, **options)
    assert (chosen := job.requeue(lost=(1,))) is not None and chosen.version == 7
    resumed = train(job, 2, seed=9, **options)
    for a, b in zip(whole, resumed, strict=True):
        assert b["start"] == 7 and b["digest"] == a["digest"]
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > 7}


class Halves(nn.Module):
    """A weight that is the sum of two tensors, one of them such a sum again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64))
        self.pair = nn.Parameter(
            TwoTensor(torch.rand(64), TwoTensor(torch.rand(64), torch.rand(64))), requires_grad=False
        )

    @torch.no_grad()
    def drift(self) -> None:
        self.pair.a.mul_(0.9)
        self.pair.b.b.add_(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * (self.pair.a + self.pair.b.a + self.pair.b.b)


def test_a_parameter_made_of_tensors_that_are_made_of_tensors(job: FakeJob) -> None:
    def once(seed: int) -> tuple[int, list[str], list[str]]:
        torch.manual_seed(seed)
        model = Halves()
        start, losses, _, report = run_plain(model)
        assert report["state"] in PROTECTED, report
        return start, losses, [part.sum().item().hex() for _, part in inner.list_parts(model.pair)]

    def run_plain(model: Halves) -> tuple[int, list[str], list[bytes], Any]:
        optimizer = torch.optim.Adam([model.scale], lr=0.05)
        losses = []
        with gemini.Checkpointer(model, optimizer) as ckpt:
            start = ckpt.resume()
            ckpt.restore_generators()
            for step in range(start + 1, 10):
                loss = (model(torch.rand(4, 64)) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item().hex())
                model.drift()
                ckpt.step()
                if step == start + 1:
                    wait_armed(ckpt)
            return start, losses, [], ckpt.report()

    job.stop_after(5)
    _, losses, last = once(1)
    wait_sealed(job, 5)
    assert job.requeue() is not None
    assert once(2) == (5, losses[5:], last)


def test_names_of_the_parts() -> None:
    model = Halves()
    tree = StateTree(model, [torch.optim.SGD([model.scale], lr=0.1)], {}, {})
    leaves, _ = tree.find_leaves()
    assert [leaf.key for leaf in leaves] == ["model.scale", "model.pair.a", "model.pair.b.a", "model.pair.b.b"]
    assert tree.find_leaves()[0] is leaves, "nothing was replaced"
    model.pair.b.a = torch.rand(64)
    again, _ = tree.find_leaves()
    assert again is not leaves and again[2].tensor is model.pair.b.a


def test_a_recipe_makes_the_same_again() -> None:
    pair = TwoTensor(torch.rand(3), TwoTensor(torch.rand(3), torch.rand(3)))
    made, parts = inner.build_recipe(pair), dict(inner.list_parts(pair))
    assert list(inner.list_paths(made)) == list(parts) == ["a", "b.a", "b.b"]
    again = inner.build_tensor(made, parts.__getitem__, torch.zeros(3))
    assert inner.build_recipe(again) == made and all(
        a is b for (_, a), b in zip(inner.list_parts(again), parts.values(), strict=True)
    )


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "torch:Tensor",
        "nowhere:Thing",
        "torch",
        ":",
        "torch:nn.Parameter",
        "sys:modules",
    ],
)
def test_saved_state_names_only_classes_of_such_tensors_that_are_imported(name: str) -> None:
    before = set(sys.modules)
    recipe = {"class": name, "about": None, "inner": {}, "size": (3,), "stride": (1,), "sharded": False}
    with pytest.raises(ValueError, match="which this script has not imported"):
        inner.build_tensor(recipe, lambda path: torch.zeros(3), torch.zeros(3))
    assert set(sys.modules) == before


def test_what_cannot_be_made_again_is_told() -> None:
    made = inner.build_recipe(TwoTensor(torch.rand(3), torch.rand(3)))
    with pytest.raises(ValueError, match="TwoTensor from its parts: AssertionError"):
        inner.build_tensor({**made, "about": "else"}, lambda path: torch.zeros(3), torch.zeros(3))


def test_a_parameter_of_another_kind_is_told(job: FakeJob) -> None:
    """Its parts would fit."""

    class Other(TwoTensor):
        pass

    model = Halves()
    tree = StateTree(model, [torch.optim.SGD([model.scale], lr=0.1)], {}, {})
    _, odd = tree.find_leaves()
    small = tree.capture_small(odd)
    model.pair = nn.Parameter(Other(torch.rand(64), TwoTensor(torch.rand(64), torch.rand(64))), requires_grad=False)
    tree.find_leaves()
    with pytest.raises(ValueError, match=r"model.pair was a .*TwoTensor of another kind than it is here"):
        tree.restore_small(small)


def test_a_part_that_cannot_be_captured_is_named() -> None:
    model = nn.Linear(3, 2)
    model.odd = nn.Parameter(TwoTensor(torch.eye(3).to_sparse(), torch.eye(3).to_sparse()), requires_grad=False)
    with pytest.raises(UnsupportedStateError, match=r"model\.odd is a "):
        StateTree(model, [torch.optim.SGD([model.weight], lr=0.1)], {}, {})
