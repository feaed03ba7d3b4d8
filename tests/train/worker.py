"""A training process for the tests, one per rank, environment as torchrun's (forked by zygote.py).

Prints one JSON line at the end: losses by step, digest of the final state, the checkpointer's report.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import gemini_hpc as gemini
from gemini_hpc.train import directory


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 50, (9,), generator=generator)
        return tokens[:-1], tokens[1:]


class Net(nn.Module):
    """Dropout, batch statistics, tied weights, a frozen tensor, layers used in another order than defined."""

    def __init__(self, width: int, batchnorm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width) if batchnorm else nn.LayerNorm(width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) * self.frozen
        for i in (2, 0, 3, 1):
            h = h + self.drop(torch.tanh(self.blocks[i](h)))
        flat = h.flatten(0, 1)
        return self.head(self.norm(flat))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    hasher = xxhash.xxh3_128()
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
    for tensor in tensors:
        t = tensor.detach()
        whole = t.full_tensor() if hasattr(t, "full_tensor") else t
        hasher.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def main(o: dict[str, Any]) -> None:
    kind = o.get("kind", "plain")
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    seed = o.get("seed", 0) + 100 * rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    if kind != "plain":
        dist.init_process_group("gloo")
    net = Net(o.get("width", 32), o.get("norm", "batch") == "batch")
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(net)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        model = fully_shard(net, mesh=mesh)
    else:
        model = net
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5) * math.cos(n / 40))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3) if o.get("scaler") else None
    loader = gemini.StatefulLoader(
        Numbers(70 * world), 4, seed=7, rank=rank, world=world, num_workers=o.get("workers", 0)
    )
    kwargs = o.get("kwargs", {})
    if o.get("no_manifest_on") == rank:
        directory.pack = lambda manifest: [].pop()
    ckpt = gemini.Checkpointer(model, optimizer, scheduler, scaler, loader, **kwargs)
    start = ckpt.resume()
    losses: dict[int, str] = {}
    batches = loader.forever()
    accumulate = o.get("accumulate", 1)
    for step in range(start + 1, o["steps"] + 1):
        total = 0.0
        optimizer.zero_grad()
        for micro in range(accumulate):
            x, y = next(batches)
            noise = random.random() + float(np.random.rand())
            if kind == "ddp":
                model.require_backward_grad_sync = micro == accumulate - 1
            loss = nn.functional.cross_entropy(model(x), y.flatten()) * (1 + 0.01 * noise) / accumulate
            if scaler is not None:
                if step == o.get("inf_at"):
                    loss = loss * math.inf
                scaler.scale(loss).backward()
            else:
                loss.backward()
            total += loss.item()
        if step == o.get("tamper_at"):
            net.blocks[0].weight.data.mul_(1.0)  # no version bump
            net.blocks[0].weight.data[0, 0] += 1.0
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        scheduler.step()
        losses[step] = total.hex()
        if o.get("twice_at") == step:
            ckpt.step()
        ckpt.step()
        if o.get("sleep_s"):
            time.sleep(o["sleep_s"])
        if step == o.get("interrupt_at") and ckpt._transport is not None:
            ckpt._transport.interrupt()
        if step == o.get("die_at"):
            print(json.dumps({"rank": rank, "losses": losses}), flush=True)
            os._exit(1)
        if step == o.get("raise_at"):
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
        if step == o.get("leave_at"):
            print(json.dumps({"rank": rank, "losses": losses}), flush=True)
            return
    final = digest(net, optimizer)
    report = ckpt.report()
    ckpt.close()
    print(json.dumps({"rank": rank, "start": start, "losses": losses, "digest": final, "report": report}), flush=True)
    if kind != "plain":
        dist.destroy_process_group()
