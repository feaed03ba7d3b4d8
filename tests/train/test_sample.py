"""Weights that are written behind the version counter's back, as public EMA classes do: seen in every version."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.train.state import capture
from gemini_hpc.train.state.sample import MOST, Places, Turns, sample_elements

from .fake_agent import FakeJob
from .test_checkpointer import capture_of, wait_armed, wait_sealed

MakeJob = Callable[[int, int], FakeJob]

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: torch.rand(64, 48),
    "short": lambda: torch.rand(3),
    "scalar": lambda: torch.rand(()),
    "empty": lambda: torch.rand(0, 3),
    "bfloat16": lambda: torch.rand(64, 48).bfloat16(),
    "double": lambda: torch.rand(33).double(),
    "bool": lambda: torch.rand(33) > 2,
    "complex64": lambda: torch.rand(33, dtype=torch.complex64),
    "complex128": lambda: torch.rand(33, dtype=torch.complex128),
    "channels last": lambda: torch.rand(4, 8, 5, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.rand(64, 48).t(),
    "narrowed": lambda: torch.rand(64, 48).narrow(1, 3, 7),
    "float8": lambda: torch.rand(64).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_is_sampled_at_the_same_places(name: str) -> None:
    view = TENSORS[name]()
    flat = view.is_contiguous()
    target = torch.empty(view.shape, dtype=view.dtype).copy_(view)  # contiguous, as in a slot
    places = Places([sample_elements(view, flat=flat)], [0])
    line = sample_elements(target, flat=flat)
    assert line.numel() <= 2 * MOST and (line.numel() > 0) == (view.numel() > 0)
    assert places.find_differing(places.read(), [line]) == []
    before = places.read()
    view.copy_(torch.ones(view.shape).to(view.dtype))
    assert places.find_differing(before, [line]) == [], "what was read is not what is there now"
    assert places.find_differing(places.read(), [line]) == ([0] if view.numel() else [])


def test_what_cannot_be_sampled_is_left_out() -> None:
    assert sample_elements(torch.rand(33, dtype=torch.complex64).conj(), flat=True).numel() == 0


def test_nothing_is_a_difference_but_bits() -> None:
    """A nan is equal to itself, and zero is not minus zero."""
    places = Places([sample_elements(t, flat=True) for t in (torch.full((9,), torch.nan), torch.zeros(9))], [0, 1])
    same = [sample_elements(t, flat=True) for t in (torch.full((9,), torch.nan), torch.zeros(9))]
    other = [same[0], sample_elements(-torch.zeros(9), flat=True)]
    assert places.find_differing(places.read(), same) == [] and places.find_differing(places.read(), other) == [1]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_weights_that_are_swapped_through_data_void_the_version(share: float) -> None:
    """The whole of them; or half, where the copy was half done."""
    model = nn.Sequential(nn.Linear(300, 20), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    made, _, area = capture_of(model, optimizer)
    job = made.begin_job(1, b"", audit=False)
    for p in model.parameters():
        count = max(1, int(share * p.shape[0]))
        p.data[:count].copy_(p.data[:count] * 0.5)
    made.copy(job, 0, area)
    assert sorted(made.find_changed(job, 0, area)) == sorted(f"model.{n}" for n, _ in model.named_parameters())


def test_tensors_take_turns() -> None:
    fews = [sample_elements(torch.full((9,), float(number)), flat=True) for number in range(10)]
    turns = Turns(fews, [1, 3, 5, 7, 9], 2)
    read = [
        sorted(torch.cat(turns.choose_places(version).read()).view(torch.float32).unique().tolist())
        for version in range(4)
    ]
    assert read == [[1.0, 7.0], [3.0, 9.0], [5.0], [1.0, 7.0]]


def test_turns_go_on_where_only_every_second_version_is_saved() -> None:
    """Turns by the version's number would leave half of the tensors out for ever."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    made, _, area = capture_of(model, optimizer)
    turns = []
    for version in (2, 4, 6):
        job = made.begin_job(version, b"", audit=False)
        made.copy(job, 0, area)
        assert made.find_changed(job, 0, area) == []
        turns.append(job.turn)
    assert turns == [0, 1, 2]


def test_where_most_parameters_were_swapped_all_of_them_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "PARAMETERS", 2)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    made, _, area = capture_of(model, optimizer)
    job = made.begin_job(1, b"", audit=False)
    for p in model.parameters():
        p.data.mul_(0.5)
    made.copy(job, 0, area)
    assert sorted(made.find_changed(job, 0, area)) == sorted(f"model.{n}" for n, _ in model.named_parameters())


def test_optimizer_tensors_are_sampled_too() -> None:
    model = nn.Linear(30, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    made, _, area = capture_of(model, optimizer)
    job = made.begin_job(1, b"", audit=False)
    for state in optimizer.state.values():
        state["exp_avg"].data.mul_(0.5)
    made.copy(job, 0, area)
    assert set(made.find_changed(job, 0, area)) == {
        "optimizer.0.model.weight.exp_avg",
        "optimizer.0.model.bias.exp_avg",
    }


class Ema:
    """As they are written everywhere: `store`, `copy_to`, `restore`, all through `.data`."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow = model, [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        for s, p in zip(self.shadow, self.model.parameters(), strict=True):
            s.lerp_(p.detach(), 0.1)

    def evaluate(self, seconds: float) -> None:
        stored = [p.data.clone() for p in self.model.parameters()]
        for s, p in zip(self.shadow, self.model.parameters(), strict=True):
            p.data.copy_(s)
        time.sleep(seconds)
        for kept, p in zip(stored, self.model.parameters(), strict=True):
            p.data.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = list(state["shadow"])


def run(job: FakeJob, seed: int, stop: int) -> tuple[int, list[str], dict[str, Any]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ema, losses = Ema(model), []
    with gemini.Checkpointer(model, optimizer, extra={"ema": ema}) as ckpt:
        start = ckpt.resume()
        for step in range(start + 1, stop + 1):
            optimizer.zero_grad()
            loss = (model(torch.rand(8, 64)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            ema.update()
            losses.append(loss.item().hex())
            ckpt.step()
            if step == start + 1:
                wait_armed(ckpt)
            ema.evaluate(0.1)
        report = copy.deepcopy(ckpt.report())
    return start, losses, report


def test_an_evaluation_with_other_weights_is_never_what_is_resumed(job: FakeJob) -> None:
    """The copy begins when they are there."""
    job.delay["BeginVersion"] = 0.03
    job.stop_after(8)
    _, losses, report = run(job, 1, 12)
    assert set(report["captured"]["eager"]) == {"model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"}
    assert report["versions"]["void"] >= 1
    wait_sealed(job, 8)
    assert (chosen := job.requeue()) is not None and chosen.version == 8
    start, again, _ = run(job, 2, 12)
    assert start == 8 and again == losses[8:]
