"""A DDP training of which one rank, or all of them, stand still at a step: `python hanging.py STEPS AT HOW`.

HOW: `sleep` or `stop`: rank 1, for ever; `pause`: all ranks, for PAUSE_S; `none`: nobody. A training that was resumed
has it behind itself."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gemini_hpc as gemini

PAUSE_S = 12.0


def forgotten() -> None:
    time.sleep(1e6)


def train(steps: int, at: int, how: str) -> None:
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ.get("GEMINI_ATTEMPT", "0"))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 32))
    model = DistributedDataParallel(net)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = gemini.Checkpointer(model, optimizer)
    start = ckpt.resume()
    print(f"rank {rank} attempt {attempt} begins at {start};", flush=True)
    for step in range(start + 1, steps + 1):
        if step == at and not start and how == "pause":
            time.sleep(PAUSE_S)
        loss = model(torch.full((4, 32), step / 60.0)).pow(2).mean()
        if step == at and not start and rank == 1:
            if how == "sleep":
                forgotten()
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
        ckpt.step()
    total = float(sum(p.double().sum() for p in model.parameters()))
    print(f"rank {rank} result {total.hex()};", flush=True)
    ckpt.close()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
