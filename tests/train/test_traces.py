"""Reading tensors of a training and bringing them back takes away nothing that may be done to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.train.state import tensors
from gemini_hpc.train.state.divergence import Divergence
from gemini_hpc.train.state.ownership import TensorEntry
from gemini_hpc.train.state.tree import StateTree

from .fake_agent import PROTECTED, FakeJob
from .test_checkpointer import wait_armed, wait_sealed


class Observed(nn.Linear):
    """A layer with buffers, below and above the size from which they have a place of their own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("small", torch.zeros(4))
        self.register_buffer("large", torch.zeros(40_000))


class Records:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "small": torch.zeros(4),
            "large": torch.zeros(40_000),
            "array": np.zeros(4),
            "bytes": bytearray(4),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


Had = tuple[Observed, torch.optim.Optimizer, Records]
DONE: dict[str, Callable[[Any, torch.optim.Optimizer, Records], object]] = {
    "a buffer is resized": lambda model, optimizer, records: model.small.resize_(9),
    "a large buffer is resized": lambda model, optimizer, records: model.large.resize_(50_000),
    "a parameter's memory is resized": lambda model, optimizer, records: model.weight.data.resize_(20, 20),
    "a moment is resized": lambda model, optimizer, records: optimizer.state[model.bias]["exp_avg"].resize_(99),
    "a tensor is resized": lambda model, optimizer, records: records.state["small"].resize_(9),
    "a large tensor is resized": lambda model, optimizer, records: records.state["large"].resize_(50_000),
    "an array is resized": lambda model, optimizer, records: records.state["array"].resize(9),
    "bytes are appended": lambda model, optimizer, records: records.state["bytes"].extend(b"more"),
    "tensors are swapped": lambda model, optimizer, records: torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
        model.bias, nn.Parameter(torch.zeros(8))
    ),
}


def train(seed: int, stop: int, end: Callable[[Had], object]) -> tuple[int, dict[str, Any]]:
    """end: what is done when the training is over, and its checkpointer still lives."""
    torch.manual_seed(seed)
    model, records = Observed(), Records()
    optimizer = torch.optim.AdamW(model.parameters())
    with gemini.Checkpointer(model, optimizer, extra={"records": records}, audit=1) as ckpt:
        first = ckpt.resume()
        for step in range(first + 1, stop + 1):
            optimizer.zero_grad()
            model(torch.rand(2, 8)).square().mean().backward()
            optimizer.step()
            ckpt.step()
            if step == first + 1:
                wait_armed(ckpt)
        ckpt.fence()
        end((model, optimizer, records))
        return first, ckpt.report()


@pytest.mark.parametrize("done", DONE)
def test_what_was_captured_and_what_was_restored(job: FakeJob, done: str) -> None:
    job.stop_after(4)
    _, report = train(1, 4, lambda had: DONE[done](*had))
    assert report["state"] in PROTECTED, report
    wait_sealed(job, 4)
    assert job.requeue() is not None
    assert train(2, 6, lambda had: DONE[done](*had))[0] == 4


def test_what_ranks_compare_stays_resizable() -> None:
    model = Observed()
    tree = StateTree(model, [], {}, {})
    for leaf in tree.find_leaves()[0]:
        tree.describe(leaf._replace(owner=leaf.owner._replace(replicated=True)), 2)
    entry = TensorEntry("model.weight", (8, 8), (0, 0), (8, 8), 4, 1)
    compared = Divergence([[entry], [entry]], frozenset(), 0)
    for _ in range(2):
        compared.compute_words({"model.weight": model.weight})
    for parameter in model.parameters():
        assert parameter.untyped_storage().resizable()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.rand(5, dtype=torch.complex64).conj(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0),
    ],
    ids=["plain", "strided", "conjugated", "scalar", "empty"],
)
def test_host_bytes_are_the_elements_in_order(tensor: torch.Tensor) -> None:
    there = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    wanted = bytes(there.reshape(-1).view(torch.uint8).tolist())
    assert tensors.copy_bytes(tensor) == wanted
    seen: list[bytes] = []
    tensors.pass_bytes(tensor, lambda part: seen.append(bytes(part)))
    assert b"".join(seen) == wanted
    assert tensor.untyped_storage().resizable()
