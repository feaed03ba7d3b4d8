"""Trainings whose ranks have different parts of a model: tensor parallel, pipeline. One has them alike, and replaces
their memory. Forked by zygote.py."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gemini_hpc as gemini
from tests.train.worker import arguments, digest, wait_armed, wait_for_seal

Step = Callable[[torch.Tensor], float]  # forward and backward of one batch; the loss, where this rank has it


def tensor_parallel() -> tuple[nn.Module, Step]:
    """Split weights, and a norm that each rank has whole. Activations between the two are split as well."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 16))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "4": RowwiseParallel()})

    def step(x: torch.Tensor) -> float:
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        return float(loss)

    return model, step


def pipeline() -> tuple[nn.Module, Step]:
    """Two stages of different shapes, under the same names."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    hidden = 32 + 16 * rank
    model = nn.Sequential(nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, 16), nn.Dropout(0.1))
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 3, loss_fn=lambda y, target: (y - target).square().mean())

    def step(x: torch.Tensor) -> float:
        if rank == 0:
            schedule.step(x)
            return 0.0
        losses: list[torch.Tensor] = []
        schedule.step(target=x.flip(1), losses=losses)
        return float(torch.stack(losses).mean())

    return model, step


class Follower(nn.Module):
    """A network, and one that follows it: in each forward its parameters get other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 16)) for _ in range(2))
        self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for ahead, behind in zip(self.first.parameters(), self.second.parameters(), strict=True):
                behind.data = behind.data * 0.9 + ahead.data * 0.1
            known = self.second(x)
        out: torch.Tensor = self.first(x) + 0.1 * known
        return out


def following() -> tuple[nn.Module, Step]:
    """The same on both ranks, and DDP around it."""
    model = nn.parallel.DistributedDataParallel(Follower())

    def step(x: torch.Tensor) -> float:
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        return float(loss)

    return model, step


KINDS = {"tp": tensor_parallel, "pipeline": pipeline, "following": following}


def main(o: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = train(o)
    gc.collect()
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def train(o: dict[str, Any]) -> dict[str, Any]:
    """All ranks draw the same numbers, as tensor parallelism wants them to."""
    torch.manual_seed(o.get("seed", 0))
    model, batch = KINDS[o["kind"]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    ckpt = gemini.Checkpointer(model, optimizer, scheduler, **arguments(o.get("kwargs", {})))
    start = ckpt.resume()
    ckpt.restore_generators()
    losses: dict[int, str] = {}
    for step in range(start + 1, o["steps"] + 1):
        optimizer.zero_grad()
        losses[step] = batch(torch.rand(12, 16)).hex()
        optimizer.step()
        scheduler.step()
        if step > start + 2:
            wait_for_seal(ckpt, step - 1)
        ckpt.step()
        if step == start + 1:
            wait_armed(ckpt)
        if step == o.get("die_at"):
            os._exit(1)
    found = digest(model, optimizer)
    report = ckpt.report()
    ckpt.close()
    return {"rank": dist.get_rank(), "start": start, "losses": losses, "digest": found, "report": report}
