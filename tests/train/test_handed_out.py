"""State that objects keep in their own way and hand out in `state_dict()` is captured, or named."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.train import start
from gemini_hpc.train.state import encode
from gemini_hpc.train.state.full_state import Whole, as_state
from gemini_hpc.train.state.tree import StateTree

from .fake_agent import PROTECTED, FakeJob
from .test_checkpointer import wait_armed, wait_sealed

Told = pytest.CaptureFixture[str]
HANDED_OUT = "is not captured and begins anew after a resume"


class Scaled(nn.Module):
    """Divides by a running largest value, as FP8 layers do by theirs; a long history changes in place."""

    def __init__(self, width: int = 3, kept: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2)
        self.largest = 1.0
        self.history = torch.zeros(kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        self.largest = 0.9 * self.largest + 0.1 * float(y.detach().abs().max())
        self.history.mul_(0.9).add_(self.largest)
        return y / (1 + self.largest + self.history.mean())

    def get_extra_state(self) -> dict[str, Any]:
        return {"largest": self.largest, "history": self.history, "packed": io.BytesIO(str(self.largest).encode())}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["packed"].read() == str(state["largest"]).encode()
        self.largest = state["largest"]
        self.history.copy_(state["history"])


def iterate(
    job: FakeJob, model: nn.Module, stop: int, given: Any = None, average: nn.Module | None = None
) -> tuple[int, list[str], dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if given is None else given
    losses = []
    with gemini.Checkpointer(model, optimizer, extra={"average": average} if average is not None else None) as ckpt:
        begun = ckpt.resume()
        for step in range(begun + 1, stop + 1):
            loss = (model(torch.rand(4, 3)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if average is not None:
                average(torch.rand(4, 3))
            losses.append(loss.item().hex())
            ckpt.step()
            if step == begun + 1:
                wait_armed(ckpt)
        return begun, losses, ckpt.report()


@pytest.mark.parametrize("kept", [8, 20_000])
def test_extra_state_comes_back(job: FakeJob, kept: int) -> None:
    """Small, and large enough for a place of its own. Also of a module in `extra`."""

    def run(seed: int) -> tuple[int, list[str], Any]:
        torch.manual_seed(seed)
        model, average = nn.Sequential(Scaled(kept=kept)), Scaled(kept=kept)
        begun, losses, report = iterate(job, model, 9, average=average)
        assert report["versions"]["void"] == 0
        return begun, losses, (average.largest, average.history.tolist())

    job.stop_after(5)
    _, losses, final = run(1)
    wait_sealed(job, 5)
    assert (chosen := job.requeue()) is not None and chosen.version == 5
    assert run(2) == (5, losses[5:], final)


def tree_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> StateTree:
    return StateTree(model, optimizers or [torch.optim.SGD(model.parameters(), lr=0.1)], {}, {})


def test_another_module_with_extra_state_does_not_fit() -> None:
    small = encode.decode(tree_of(nn.Sequential(Scaled())).pack_small({}, [], 1).data)
    with pytest.raises(ValueError, match=r"differ in what get_extra_state\(\) hands out: model.0._extra_state"):
        tree_of(nn.Sequential(nn.Linear(3, 2))).restore_small({**small, "buffers": {}})


def test_an_older_version_without_extra_state_is_taken() -> None:
    model = nn.Sequential(Scaled())
    small = encode.decode(tree_of(model).pack_small({}, [], 1).data)
    del small["extra_state"]
    tree_of(model).restore_small(small)


def test_an_export_has_the_names_of_torch() -> None:
    model = nn.Sequential(Scaled())
    small = encode.decode(tree_of(model).pack_small({}, [], 1).data)
    assert as_state(Whole(small=small))["model"]["0._extra_state"]["largest"] == 1.0


def test_what_another_programs_checkpoint_does_not_bring_is_told(tmp_path: Path) -> None:
    model = nn.Sequential(Scaled())
    torch.save({name: value for name, value in model.state_dict().items() if "extra" not in name}, tmp_path / "f")
    assert start.load(tree_of(model), str(tmp_path / "f"), "default", 0, 1).description.endswith(
        "; not read: model.0._extra_state"
    )


# ---- what cannot be captured ---------------------------------------------------------------------------


class Metric(nn.Module):
    """A metric as torchmetrics keeps it: neither buffer nor parameter, and in the state_dict() all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        found[kwargs.get("prefix", "") + "total"] = self.total
        return found


class GivesOnly(nn.Module):
    def get_extra_state(self) -> int:
        return 3


class Hooked(nn.Linear):
    """Hands out its weight under another name, and something derived from it."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_state_dict_post_hook(_hand_out)


def _hand_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[prefix + "old_weight"] = state[prefix + "weight"]
    state[prefix + "weight.norm"] = state[prefix + "weight"].norm()
    state[prefix + "stamp"] = 3


class Twofold(torch.optim.SGD):
    """Hands out a count, and slow weights that are in its state, too."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "inner": super().state_dict(), "slow": list(_tensors(self)), "count": 5}


class Late(torch.optim.SGD):
    """Has something to hand out once it has stepped."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "seen": {"norm": 1.0} if self.state else {}}


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for values in optimizer.state.values() for value in values.values() if value is not None]


@pytest.mark.parametrize(
    ("kind", "named"),
    [(Metric, ["model.1.total"]), (GivesOnly, ["model.1._extra_state"]), (Hooked, ["model.1.stamp"])],
)
def test_what_only_a_modules_own_state_dict_has_is_found(kind: Callable[[], nn.Module], named: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), kind())
    assert tree_of(model).build_entry_searches()["model"]() == named


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_usual_model_hands_out_nothing_else(wrapped: bool) -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(3), nn.utils.spectral_norm(nn.Linear(3, 2)), Scaled(2))
    found = tree_of(torch.compile(model) if wrapped else model)
    assert not any(look() for look in found.build_entry_searches().values())


def test_what_only_an_optimizers_own_state_dict_has_is_found() -> None:
    model = nn.Linear(3, 2)
    optimizer = Twofold(model.parameters(), lr=0.1, momentum=0.9)
    assert not tree_of(model, optimizer).build_entry_searches()["optimizer 0 (Twofold)"](), (
        "it may have to step for that"
    )
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert tree_of(model, optimizer).build_entry_searches()["optimizer 0 (Twofold)"]() == ["count"]


def test_it_is_told_once_at_construction(job: FakeJob, capfd: Told) -> None:
    model = nn.Sequential(nn.Linear(3, 2), Metric())
    model[1].forward = lambda x: x  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = gemini.Checkpointer(model, optimizer)
    told = [line for line in capfd.readouterr().err.splitlines() if HANDED_OUT in line]
    assert len(told) == 1 and "the state_dict() of model also has model.1.total" in told[0]
    ckpt.close()


def test_what_appears_with_the_first_step_is_told_then(job: FakeJob, capfd: Told) -> None:
    model = nn.Linear(3, 2)
    _, _, report = iterate(job, model, 4, Late(model.parameters(), lr=0.1, momentum=0.9))
    told = [line for line in capfd.readouterr().err.splitlines() if HANDED_OUT in line]
    assert len(told) == 1 and "the state_dict() of optimizer 0 (Late) also has seen" in told[0]
    assert report["state"] in PROTECTED and told[0].split(": ", 2)[2] in report["findings"]


def test_a_state_dict_that_raises_is_no_obstacle(job: FakeJob, capfd: Told) -> None:
    class Raising(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            raise RuntimeError("consolidate first")

    model = nn.Linear(3, 2)
    _, _, report = iterate(job, model, 4, Raising(model.parameters(), lr=0.1))
    assert report["state"] in PROTECTED and HANDED_OUT not in capfd.readouterr().err
