"""Sparse parameters that are not trained: captured by what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini

from .fake_agent import PROTECTED, FakeJob
from .test_checkpointer import wait_armed, wait_sealed

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "coalesced": lambda dense: dense.to_sparse().coalesce(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}
Edit = Callable[["Pruned"], None]


class Pruned(nn.Module):
    """A fixed graph of random weights, and what is trained behind it."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.head = nn.Linear(8, 2)
        self.replace()

    def replace(self, kept: int = 3) -> None:
        places = (torch.randperm(8)[:, None] + torch.arange(kept)) % 8
        dense = torch.zeros(8, 8).scatter(1, places, torch.rand(8, kept) + 0.5)
        if self.layout in ("bsr", "bsc"):  # with as many blocks each time
            dense = torch.kron(torch.eye(4)[torch.randperm(4)], torch.rand(2, 2) + 0.5)
        self.graph = nn.Parameter(LAYOUTS[self.layout](dense), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x @ self.graph.detach().to_dense())
        return out


def train(seed: int, stop: int, layout: str = "coo", *, at: int = 0, edit: Edit | None = None) -> Any:
    torch.manual_seed(seed)
    model = Pruned(layout)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.05)
    losses = []
    with gemini.Checkpointer(model, optimizer) as ckpt:
        first = ckpt.resume()
        ckpt.restore_generators()
        for step in range(first + 1, stop + 1):
            if edit is not None and step == at:
                ckpt.fence()
                edit(model)
            loss = model(torch.rand(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            ckpt.step()
            if step == first + 1:
                wait_armed(ckpt)
        return first, losses, ckpt.report()


def scale(model: Pruned) -> None:
    here = model.graph.detach()
    (here._values() if here.layout == torch.sparse_coo else here.values()).mul_(1.5)


def thaw(model: Pruned) -> None:
    model.graph.requires_grad_(True)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("layout", "edit"),
    [("coo", None), ("coo", scale), ("csr", scale), *((layout, Pruned.replace) for layout in LAYOUTS)],
)
def test_a_frozen_one_comes_back(job: FakeJob, layout: str, edit: Edit | None) -> None:
    """Also what was done to it in mid-training."""
    job.stop_after(5)
    _, losses, report = train(1, 9, layout, at=3, edit=edit)
    assert report["state"] in PROTECTED, report
    wait_sealed(job, 5)
    assert (chosen := job.requeue()) is not None and chosen.version == 5
    assert train(2, 9, layout)[:2] == (5, losses[5:])


def test_with_other_numbers_of_elements(job: FakeJob, capfd: pytest.CaptureFixture[str]) -> None:
    """Planned anew; a training that has not as many at the resume is told."""
    job.stop_after(5)
    _, _, report = train(1, 9, at=3, edit=lambda model: model.replace(4))
    assert report["state"] in PROTECTED and "model.graph.indices was (2, 24)" in capfd.readouterr().err
    wait_sealed(job, 5)
    assert job.requeue() is not None
    with pytest.raises(ValueError, match=r"model\.graph\.indices is \(2, 24\) .* was saved as \(2, 32\)"):
        train(2, 9)


def test_one_that_is_trained_later_ends_protection(job: FakeJob, capfd: pytest.CaptureFixture[str]) -> None:
    first, losses, report = train(1, 5, at=3, edit=thaw)
    assert (first, len(losses), report["state"]) == (0, 5, "unprotected")
    said = [line for line in capfd.readouterr().err.splitlines() if "no longer protected" in line]
    assert len(said) == 1 and "model.graph is a Parameter (torch.sparse_coo, cpu)" in said[0], said
    assert all(seal.version < 3 for seal in job.seals)
