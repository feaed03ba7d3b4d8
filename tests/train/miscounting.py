"""A training under DDP some of whose ranks leave out or repeat a `step()` (forked by zygote.py)."""

from __future__ import annotations

import gc
import json
import os
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gemini_hpc as gemini
from tests.train.watched_trainings import layers
from tests.train.worker import arguments, wait_armed, wait_for_seal


def main(o: dict[str, Any]) -> None:
    """A protected training under DDP; `deeds` is by rank and iteration. Each rank ends itself at `die_at`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(layers(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = {"iteration": 0}  # what a resume must never mix
    ckpt = gemini.Checkpointer(model, optimizer, extra={"where": Where(where)}, **arguments(o["kwargs"]))
    start = ckpt.resume()
    begun = dict(where)
    with model.join() if o.get("join") else nullcontext():
        run(o, model, optimizer, ckpt, where, begun, generator)
    report = ckpt.report()
    ckpt.close()
    del model, optimizer
    gc.collect()
    print(json.dumps({"rank": rank, "start": start, "begun": begun["iteration"], "report": report}), flush=True)
    dist.destroy_process_group()


def run(
    o: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ckpt: gemini.Checkpointer,
    where: dict[str, int],
    begun: dict[str, int],
    generator: torch.Generator,
) -> None:
    rank = dist.get_rank()
    while where["iteration"] < o["iterations"]:
        where["iteration"] += 1
        optimizer.zero_grad()
        model(torch.randn(8, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        if where["iteration"] == o.get("die_at"):
            dist.barrier()
            os._exit(1)
        deed = o["deeds"].get(f"{rank} {where['iteration']}", "")
        for _ in range({"": 1, "twice": 2}.get(deed, 0)):
            ckpt.step()
        if where["iteration"] == begun["iteration"] + 1:
            wait_armed(ckpt)
        elif where["iteration"] == o["common"]:
            wait_for_seal(ckpt, ckpt.version)
        time.sleep(0.02)


class Where:
    """A rank's place in the training, as a part of its state."""

    def __init__(self, where: dict[str, int]) -> None:
        self._where = where

    def state_dict(self) -> dict[str, int]:
        return dict(self._where)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._where.update(state)
