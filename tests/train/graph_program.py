"""A training of one rank whose iterations are CUDA graphs, on a device of the tests. One process.

Options: graphs, "whole" (an iteration is one), "two" (the optimizer's step has its own), "none"; made, "before" (the
Checkpointer, then warm-up and capture), "after", "mid" (captured after three iterations); start, on which copies
begin; steps, die_at, seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.train.device import host_copy
from gemini_hpc.train.device.host_copy import HostCopies
from tests.train import fake_graph, worker
from tests.train.fake_gpu import LiveDevice

EAGER = 3  # iterations


class Graphed:
    """Model, optimizer, and what an iteration does with them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batch, self.loss = torch.zeros(6, 5), torch.zeros(())
        self.replays: list[Any] = []

    def backward(self) -> None:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.loss = loss.detach()

    def eager(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def capture(self, *parts: Callable[[], object]) -> None:
        """Each part into a graph of its own."""
        self.optimizer.zero_grad()
        for part in parts:
            self.replays.append(torch.cuda.CUDAGraph())
            with fake_graph.capture(self.replays[-1]):
                part()

    def whole(self) -> None:
        self.backward()
        self.optimizer.step()

    def iterate(self, step: int) -> str:
        """Return the loss."""
        self.batch.copy_(torch.randn(6, 5, generator=torch.Generator().manual_seed(step)))
        for graph in self.replays:
            graph.replay()
        if not self.replays:
            self.eager()
        return self.loss.item().hex()


def main(o: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    fake_graph.install(setattr)
    device = LiveDevice(o.get("seed", 0), 1)
    host_copy.create_copies = lambda _: HostCopies(device, lambda tensor: True)
    training = Graphed(o.get("seed", 0))
    parts = {"whole": [training.whole], "two": [training.backward, training.optimizer.step], "none": []}[o["graphs"]]

    def prepare() -> None:
        for _ in range(EAGER):
            training.eager()
        training.capture(*parts)

    if o["made"] == "after":
        prepare()
    ckpt = gemini.Checkpointer(training.model, training.optimizer, **worker.arguments(o.get("kwargs", {})))
    if o["made"] == "before":
        prepare()
    start, losses = ckpt.resume(), {}
    for step in range(start + 1, o["steps"] + 1):
        if o["made"] == "mid" and step == start + 1 + EAGER:
            training.capture(*parts)
        losses[step] = training.iterate(step)
        ckpt.step()
        if step <= start + 2:
            worker.wait_armed(ckpt)
        if step == o.get("die_at"):
            worker.wait_for_seal(ckpt, step)
            os._exit(1)
    told = {"start": start, "losses": losses, "digest": worker.digest(training.model, training.optimizer)}
    told["report"] = ckpt.report()
    ckpt.close()
    print(json.dumps({"rank": 0, **told}), flush=True)
