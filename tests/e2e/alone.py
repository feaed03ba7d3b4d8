"""A training whose ranks share nothing, so that only the copies wait for a peer. Prints the length of each step.

srun python alone.py LOG STEPS
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import gemini_hpc as gemini


def main() -> None:
    log, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters())
    ckpt = gemini.Checkpointer(model, optimizer)
    ckpt.resume()
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with open(log, "a", buffering=1) as file:
        before = time.time()
        for step in range(ckpt.version + 1, steps + 1):
            optimizer.zero_grad()
            model(torch.ones(4, 256)).sum().backward()
            optimizer.step()
            ckpt.step()
            time.sleep(0.02)
            now = time.time()
            line = {"step": step, "restart": restart, "rank": dist.get_rank(), "at": now, "seconds": now - before}
            file.write(json.dumps(line) + "\n")
            before = now
    ckpt.close()


main()
