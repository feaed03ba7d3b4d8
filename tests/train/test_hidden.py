"""4-bit weights as bitsandbytes has them (`Params4bit`): what their packed values mean is no part of their memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.train import start
from gemini_hpc.train.state.modules import UnsupportedStateError
from gemini_hpc.train.state.tree import StateTree

from .fake_agent import PROTECTED, FakeJob
from .test_checkpointer import wait_armed, wait_sealed

BLOCK = 16


class QuantState:
    """As it is there: nested scales, plain values beside them."""

    def __init__(self, absmax: torch.Tensor, code: torch.Tensor, blocksize: int, state2: QuantState | None = None):
        self.absmax, self.code, self.blocksize, self.state2 = absmax, code, blocksize, state2
        self.shape, self.dtype, self.quant_type = torch.Size((64, 64)), torch.float32, "nf4"
        self.offset = torch.rand(()) if state2 is not None else None
        self.nested = state2 is not None


class Params4bit(nn.Parameter):
    quant_state: Any

    def __new__(cls, data: torch.Tensor, quant_state: Any = None) -> Params4bit:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = quant_state
        return self


class Packed(nn.Module):
    """A frozen weight of two values a byte, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        packed = torch.randint(0, 256, (64 * 64 // 2, 1), dtype=torch.uint8)
        self.weight = Params4bit(packed, self.scales())
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    @staticmethod
    def scales() -> QuantState:
        nested = QuantState(torch.rand(4), torch.rand(256), 64)
        return QuantState(torch.randint(0, 256, (256,), dtype=torch.uint8), torch.rand(16), BLOCK, nested)

    @property
    def state(self) -> QuantState:
        found: QuantState = self.weight.quant_state
        return found

    def requantize(self) -> None:
        """Other scales in the place of the old ones."""
        self.state.absmax = self.state.absmax.flip(0)
        self.state.code = self.state.code.flip(0) * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, state, outer = self.weight.reshape(-1), self.state, self.state.state2
        assert outer is not None and state.offset is not None
        values = state.code[torch.stack([flat >> 4, flat & 15], 1).reshape(-1).int()]
        scales = outer.code[state.absmax.int()] * outer.absmax.repeat_interleave(64) + state.offset
        whole = (values * scales.repeat_interleave(BLOCK)).reshape(state.shape)
        out: torch.Tensor = x @ whole + self.up(self.down(x))
        return out


def train(seed: int, stop: int, *, requantize_at: int = 0, make: Callable[[], Packed] = Packed) -> Any:
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    with gemini.Checkpointer(model, optimizer) as ckpt:
        first = ckpt.resume()
        ckpt.restore_generators()
        for step in range(first + 1, stop + 1):
            if step == requantize_at:
                model.requantize()
            loss = model(torch.rand(4, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            ckpt.step()
            if step == first + 1:
                wait_armed(ckpt)
        capture = ckpt._engine.planning.capture
        still = capture.find_unchanged(stop - 1) if capture is not None else frozenset()
        rows = [capture.manifest.rows[capture.manifest.pieces[n].row].key for n in sorted(still)] if capture else []
        return first, losses, ckpt.report(), rows


@pytest.mark.parametrize("requantize_at", [0, 3])
def test_scales_come_back_with_the_values(job: FakeJob, requantize_at: int) -> None:
    """In a process that has loaded another model, or the same and quantized it in another way since."""
    job.stop_after(5)
    _, losses, report, still = train(1, 9, requantize_at=requantize_at)
    assert report["state"] in PROTECTED and not report["captured"]["eager"], report
    below = ("absmax", "code", "offset", "state2.absmax", "state2.code")
    assert {"model.weight", *(f"model.weight.quant_state.{name}" for name in below)} <= set(still), "sent once"
    wait_sealed(job, 5)
    assert (chosen := job.requeue()) is not None and chosen.version == 5
    assert train(2, 9)[:2] == (5, losses[5:])


def coarse() -> Packed:
    model = Packed()
    model.state.blocksize = 2 * BLOCK
    return model


def test_what_was_quantized_in_another_way_is_told(job: FakeJob) -> None:
    job.stop_after(5)
    train(1, 5)
    wait_sealed(job, 5)
    assert job.requeue() is not None
    with pytest.raises(ValueError, match=r"model\.weight was a .*QuantState of another kind than it is here"):
        train(2, 9, make=coarse)


@pytest.mark.parametrize("late", [False, True])
def test_what_cannot_be_captured_trains_unprotected(
    job: FakeJob, capfd: pytest.CaptureFixture[str], late: bool
) -> None:
    class Odd(Packed):
        def __init__(self) -> None:
            super().__init__()
            if not late:
                self.requantize()

        def requantize(self) -> None:
            self.state.handle = object()  # type: ignore[attr-defined]

    first, losses, report, _ = train(1, 5, requantize_at=3, make=Odd)
    assert (first, len(losses), report["state"]) == (0, 5, "unprotected")
    said = [line for line in capfd.readouterr().err.splitlines() if "protected" in line and " since " not in line]
    why = "what model.weight has in its quant_state cannot be captured: state['quant_state.handle'] is a "
    assert len(said) == 1 and why in said[0], said
    assert all(seal.version < 3 for seal in job.seals)


def tree_of(model: nn.Module) -> StateTree:
    return StateTree(model, [torch.optim.SGD(model.down.parameters(), lr=0.1)], {}, {})  # type: ignore[union-attr]


def test_scales_that_the_module_has() -> None:
    """FSDP2 puts a parameter of its own into the place, and bitsandbytes' module keeps the rest."""
    model = Packed()
    names = [leaf.key for leaf in tree_of(model).find_leaves()[0]]
    assert "model.weight.quant_state.state2.absmax" in names
    state, model.weight = model.state, nn.Parameter(model.weight.data, requires_grad=False)  # type: ignore[assignment]
    assert not any("quant_state" in leaf.key for leaf in tree_of(model).find_leaves()[0])
    model.quant_state = state  # type: ignore[assignment]
    assert [leaf.key for leaf in tree_of(model).find_leaves()[0]] == names


def test_weights_that_are_quantized_after_the_construction() -> None:
    model = Packed()
    state, model.weight.quant_state = model.state, None
    tree = tree_of(model)
    leaves = tree.find_leaves()[0]
    assert tree.find_leaves()[0] is leaves and not any("quant_state" in leaf.key for leaf in leaves)
    model.weight.quant_state = state
    assert "model.weight.quant_state.absmax" in [leaf.key for leaf in tree.find_leaves()[0]]
    state.code = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedStateError, match=r"model\.weight"):
        tree_of(model)


def test_another_programs_file_is_refused(tmp_path: Path) -> None:
    """It has the packed values under the same name, and the scales under others."""
    model = Packed()
    torch.save(model.state_dict(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"model\.weight is quantized"):
        start.load(tree_of(model), str(tmp_path / "out"), "default", 0, 1)
