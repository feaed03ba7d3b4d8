"""DDP's buckets are rebuilt at a resume, whatever kinds of gradients DDP expects."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_hpc as gemini
from gemini_hpc.train.state.buckets import ArrivalOrder

from .fake_agent import FakeJob
from .test_checkpointer import assert_comes_back, wait_armed


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield
    dist.destroy_process_group()


class Bags(nn.Module):
    """Embeddings with sparse gradients, one of them tied to a layer with a dense one, and a layer behind them."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=True)
        self.bags = nn.EmbeddingBag(20, 8, sparse=True, mode="sum")
        self.head = nn.Linear(8, 20)
        if tied:
            self.again = nn.Embedding(20, 8, sparse=True)
            self.again.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(x).sum(1) + self.bags(x))
        return out


@pytest.mark.parametrize("tied", [False, True])
def test_a_replay_leaves_ddp_ready(tied: bool) -> None:
    """Its gradients are of the kinds that DDP expects, and it warns of nothing."""
    ddp = DistributedDataParallel(Bags(tied=tied))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ArrivalOrder(ddp).replay([3, 2, 1, 0])
    for _ in range(2):
        ddp(torch.randint(0, 20, (4, 3))).square().mean().backward()
    words = ddp.module.words.weight.grad
    assert words is not None and words.is_sparse


def train(seed: int, stop: int) -> tuple[int, list[str], dict[str, Any]]:
    torch.manual_seed(seed)
    model = Bags(tied=False)
    ddp = DistributedDataParallel(model)
    sparse: torch.optim.Optimizer = torch.optim.SparseAdam([model.words.weight, model.bags.weight], lr=0.05)
    dense = torch.optim.AdamW(model.head.parameters(), lr=0.05)
    losses = []
    with gemini.Checkpointer(ddp, [sparse, dense]) as ckpt:
        first = ckpt.resume()
        ckpt.restore_generators()
        for step in range(first + 1, stop + 1):
            loss = ddp(torch.randint(0, 20, (4, 3))).square().mean()
            for optimizer in (sparse, dense):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (sparse, dense):
                optimizer.step()
            losses.append(loss.item().hex())
            ckpt.step()
            if step == first + 1:
                wait_armed(ckpt)
        return first, losses, ckpt.report()


def test_embeddings_with_sparse_gradients_come_back(job: FakeJob) -> None:
    assert_comes_back(job, train)
