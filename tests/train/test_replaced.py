"""Tensors that are replaced, not changed, in mid-training: captured from then on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini

from .fake_agent import PROTECTED, FakeJob
from .launch import Run, train
from .test_checkpointer import wait_armed, wait_sealed

MakeJob = Callable[[int, int], FakeJob]
Edit = Callable[[nn.Module, torch.optim.Optimizer], None]


class Running(nn.Module):
    """A mean and a queue by assignment, a buffer that is None at first, one that comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("queue", torch.zeros(0, 3))
        self.register_buffer("first", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        seen = h.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * seen
        self.queue = torch.cat([self.queue, seen[None]])[-6:]
        if self.first is None:
            self.first = seen.clone()
        if not hasattr(self, "late"):
            self.register_buffer("late", seen.clone(), persistent=False)
        out: torch.Tensor = self.head(h + self.mean + self.first + self.late)
        return out


def run(job: FakeJob, seed: int, stop: int, *, at: int = 0, edit: Edit | None = None, before: bool = False) -> Any:
    """`edit` happens in step `at`; before: also before resume(), as a program does that knows of it."""
    torch.manual_seed(seed)
    model = Running()
    optimizer = torch.optim.AdamW([{"params": model.head.parameters()}], lr=0.05)
    if before and edit is not None:
        edit(model, optimizer)
    losses = []
    with gemini.Checkpointer(model, optimizer) as ckpt:
        start = ckpt.resume()
        for step in range(start + 1, stop + 1):
            if edit is not None and step == at:
                edit(model, optimizer)
            loss = (model(torch.rand(4, 3)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            ckpt.step()
            if step == start + 1:
                wait_armed(ckpt)
        report = ckpt.report()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return start, losses, {name: tensor.tolist() for name, tensor in state.items()}, report


def resumes(job: FakeJob, at: int, edit: Edit | None = None, **again: Any) -> None:
    """Stopped after version 5 and resumed, it is the training that was never stopped."""
    job.stop_after(5)
    _, losses, state, report = run(job, 1, 9, at=at, edit=edit)
    assert report["state"] in PROTECTED
    wait_sealed(job, 5)
    chosen = job.requeue()
    assert chosen is not None and chosen.version == 5
    start, losses2, state2, _ = run(job, 2, 9, at=at, edit=edit, **again)
    assert start == 5
    assert losses2 == losses[5:]
    assert state2 == state


def test_buffers_that_are_assigned(job: FakeJob) -> None:
    resumes(job, 0)


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inner: Any = model.inner
    optimizer.add_param_group({"params": inner.parameters(), "lr": 0.01})


def test_a_group_that_is_added_in_mid_training_is_there_again(job: FakeJob) -> None:
    resumes(job, 3, unfreeze)


def reset_head(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Another head of the same shape in the old one's place, in the model and in the optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model.head = nn.Linear(3, 2)
    optimizer.param_groups[0]["params"] = list(model.head.parameters())
    optimizer.state.clear()


def test_a_module_that_is_replaced_by_one_of_the_same_shape(job: FakeJob) -> None:
    resumes(job, 3, reset_head)


class Wrapped(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.old, self.more = head, nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.old(x) * self.more
        return out


def add_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inner: Any = model.inner
    inner.register_parameter("gain", nn.Parameter(torch.ones(3)))
    inner.register_forward_hook(lambda m, args, out: out * m.gain)
    optimizer.add_param_group({"params": [inner.gain], "lr": 0.1})


def test_a_parameter_that_is_added_in_mid_training(job: FakeJob) -> None:
    resumes(job, 3, add_parameter, before=True)


def test_a_parameter_that_the_resumed_training_lacks_is_named(job: FakeJob) -> None:
    job.stop_after(5)
    run(job, 1, 9, at=3, edit=add_parameter)
    wait_sealed(job, 5)
    assert job.requeue() is not None
    with pytest.raises(ValueError, match=r"model\.inner\.gain, which this training does not have.*before resume"):
        run(job, 2, 9, at=3, edit=add_parameter)


def widen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.head = nn.Linear(3, 4)
    optimizer.param_groups[0]["params"] = list(model.head.parameters())


def rename(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.head = Wrapped(model.head)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("edit", "why"), [(widen, r"model\.head\.weight was .* now"), (rename, "model.head.weight is gone")]
)
def test_what_does_not_fit_the_plan_any_more_is_planned_anew(
    job: FakeJob, capfd: pytest.CaptureFixture[str], edit: Edit, why: str
) -> None:
    """That version is not saved, which one line says; the next one is."""
    resumes(job, 3, edit, before=True)
    said = [line for line in capfd.readouterr().err.splitlines() if "head" in line]
    assert len(said) == 1, said
    assert re.search(f"version 3 skipped: {why}", said[0]), said


class Fickle(torch.optim.SGD):
    """State that is a tensor now and a number then, as LBFGS has, and a tensor of ever another shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            mine = self.state[p]
            count = mine["count"] = mine.get("count", 0) + 1
            before = mine.get("scale", 1.0)
            mine["scale"] = before * 0.9 if count % 3 else torch.tensor([float(before)])
            mine["recent"] = torch.full((count % 5 + 1,), float(before))
            p.sub_(p.grad * (0.1 * float(before) + 0.01 * float(mine["recent"].sum())))


@pytest.mark.parametrize("at", [4, 16, 33])
def test_an_optimizer_whose_state_does_not_keep_its_shape(job: FakeJob, at: int) -> None:
    """It is planned anew; what changes again is part of the small state from then on."""

    def once(seed: int) -> tuple[int, list[str], dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 4)
        optimizer = Fickle(model.parameters(), lr=0.1)
        losses = []
        with gemini.Checkpointer(model, optimizer) as ckpt:
            start = ckpt.resume()
            for step in range(start + 1, 41):
                loss = (model(torch.rand(4, 3)) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item().hex())
                ckpt.step()
                if step == start + 1:
                    wait_armed(ckpt)
            return start, losses, ckpt.report()

    job.stop_after(at)
    _, losses, report = once(1)
    assert report["state"] in PROTECTED
    assert report["versions"]["void"] == 0, report
    chosen = job.requeue()
    assert chosen is not None and chosen.version == (3 if at == 4 else at)
    start, again, _ = once(2)
    assert start == chosen.version and again == losses[start:]


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(job: FakeJob, search: str | None) -> None:
    def once(seed: int) -> tuple[int, list[str], dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4, line_search_fn=search)
        losses = []
        with gemini.Checkpointer(model, optimizer) as ckpt:
            start = ckpt.resume()
            for step in range(start + 1, 16):
                x = torch.rand(16, 3)

                def closure(x: torch.Tensor = x) -> Any:
                    optimizer.zero_grad()
                    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                    loss.backward()
                    return loss

                losses.append(float(optimizer.step(closure).detach()).hex())
                ckpt.step()
                if step == start + 1:
                    wait_armed(ckpt)
            return start, losses, ckpt.report()

    job.stop_after(10)
    _, losses, report = once(1)
    assert report["state"] in PROTECTED and report["versions"]["void"] == 0, report
    chosen = job.requeue()
    assert chosen is not None and chosen.version > 7
    start, again, _ = once(2)
    assert start == chosen.version and again == losses[start:]


@pytest.mark.slow
def test_a_gathered_model_is_the_sharded_one(make_job: MakeJob) -> None:
    """FSDP2 leaves the parameters that an evaluation has gathered in their modules."""
    job = make_job(2, 2)
    job.stop_after(7)
    options = {"kind": "fsdp2", "steps": 12, "evaluate_before": True, "kwargs": {"audit": 1}}
    whole = train(job, 2, **options)
    assert [r["report"]["state"] for r in whole] == ["protected"] * 2, whole[0]["report"]["findings"]
    chosen = job.requeue(lost=(1,))
    assert chosen is not None and chosen.version == 7
    resumed = train(job, 2, seed=5, **options)
    assert [r["digest"] for r in resumed] == [r["digest"] for r in whole]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        ((2, 2), {"gpu": {}, "kwargs": {"transport": "nccl", "every": 1}}),
        ((1, 1), {}),
        ((2, 2), {"kwargs": {"scheme": "background"}}),
        ((2, 2), {"kwargs": {"scheme": "blocking"}}),
    ],
    ids=["nccl", "one replica", "background", "blocking"],
)
def test_protection_ends_where_the_ranks_cannot_plan_anew(
    make_job: MakeJob, nodes: tuple[int, int], options: dict[str, Any]
) -> None:
    """At that step, with a line; what is sealed then is from before it, and right."""
    training = {"kind": "ddp", "steps": 12, "fickle": True}
    options = {**options, "armed": True, "sleep_s": 0.05}
    job = make_job(*nodes)
    whole = [r["digest"] for r in train(None, 2, **training)]
    run = Run(job, 2, {**training, **options})
    results = run.wait()
    assert [r["digest"] for r in results] == whole and not job.corrupt
    for result, err in zip(results, run.stderr, strict=True):
        assert result["report"]["state"] == "unprotected"
        said = [line for line in err.splitlines() if "no longer protected" in line]
        why = r"no longer protected: optimizer\.0\.model\.\S+\.recent was \(1,\) .*, is \(2,\) .* now, and the ranks"
        assert len(said) == 1 and re.search(why, said[0]), err
    assert (chosen := job.requeue()) is not None and 0 < chosen.version < 8, "the state changes in step 8"
    resumed = train(job, 2, seed=9, **training, **options)
    assert [(r["start"], r["digest"]) for r in resumed] == [(chosen.version, digest) for digest in whole]
