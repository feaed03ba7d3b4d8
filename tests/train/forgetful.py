"""A training under DDP that has state which nothing captures, on all ranks or on one (forked by zygote.py)."""

from __future__ import annotations

import gc
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

import gemini_hpc as gemini
from tests.train.watched_trainings import layers
from tests.train.worker import arguments, wait_armed


class Counting(torch.optim.SGD):
    """An optimizer that hands out more than its state."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "count": 5}


def main(o: dict[str, Any]) -> None:
    """Train for some steps; the optimizer makes none in the first two. counts_on: the rank whose optimizer hands out
    more than its state."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(layers(8, 8))
    optimizer = (Counting if rank == o["counts_on"] else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    ckpt = gemini.Checkpointer(model, optimizer, **arguments(o["kwargs"]))
    ckpt.resume()
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(8, 8)).square().mean().backward()
        if step > 1:
            optimizer.step()
            scheduler.step()
        ckpt.step()
        if step == 2:
            wait_armed(ckpt)
    report = ckpt.report()
    ckpt.close()
    del model, optimizer, scheduler
    gc.collect()
    print(json.dumps({"rank": rank, "report": report}), flush=True)
    dist.destroy_process_group()
