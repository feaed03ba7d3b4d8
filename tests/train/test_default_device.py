"""A script that has set torch's default device: tensors of ours are where they have to be all the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import _device_constructors

import gemini_hpc as gemini

from .fake_agent import FakeJob
from .test_checkpointer import assert_comes_back, wait_armed

PACKAGE = Path(gemini.__file__).parent


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path) -> Iterator[None]:
    """Return a device where nothing can be read: a tensor made there by mistake ends the test."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    dist.destroy_process_group()


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 64, device="cpu")


class History:
    def __init__(self) -> None:
        self.large, self.empty = torch.zeros(40_000, device="cpu"), torch.zeros(0, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def train(seed: int, stop: int) -> tuple[int, list[str], dict[str, Any]]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8, device="cpu"), nn.Dropout()))
    optimizer = torch.optim.AdamW(model.parameters())
    loader, history = gemini.StatefulLoader(Numbers(), 4, seed=1), History()
    losses = []
    with gemini.Checkpointer(model, optimizer, loader=loader, extra={"history": history}, audit=1) as ckpt:
        first = ckpt.resume()
        batches = loader.iterate_forever()
        for step in range(first + 1, stop + 1):
            optimizer.zero_grad()
            loss = model(next(batches)).square().mean()
            loss.backward()
            optimizer.step()
            history.large[step] = loss.item()
            losses.append(loss.item().hex())
            ckpt.step()
            if step == first + 1:
                wait_armed(ckpt)
        return first, losses, ckpt.report()


def test_a_training_comes_back(job: FakeJob) -> None:
    assert_comes_back(job, train)


def test_each_tensor_of_ours_says_where_it_is() -> None:
    makes = {made.__name__ for made in _device_constructors()}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for room in ("train", "integrations")
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value) == "torch" and node.func.attr in makes
        if "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert found == []
