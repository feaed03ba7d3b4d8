"""A small training for the launcher's tests: python -m gemini_hpc.launch toy.py OPTIONS, one JSON object.

log: a directory, in which each rank appends lines of JSON to a file of its own; steps, pause_s; workers: of the data
loader; faults: what a rank does to itself, each {"rank", "attempt", "step", "how"}. At step 0 that is before
`Checkpointer` is made, at step -1 when the training has succeeded. leaks: rank and MiB that it loses with each step.
sigterm: seconds and status with which each rank ends on SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.utils.data import TensorDataset

import gemini_hpc as gemini

OPTIONS: dict[str, Any] = json.loads(sys.argv[1])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ.get("GEMINI_ATTEMPT", "0"))


def say(what: str, **more: Any) -> None:
    line = {"what": what, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "t": time.time(), **more}
    fd = os.open(Path(OPTIONS["log"], f"rank{RANK}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)


def stumble(step: int) -> None:
    """Do what is to happen at this step."""
    for fault in OPTIONS.get("faults", ()):
        if (fault["rank"], fault["attempt"], fault["step"]) != (RANK, ATTEMPT, step):
            continue
        say("fault", step=step)
        if fault["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault["how"] == "raise":
            raise ValueError(f"a mistake at step {step}")
        elif fault["how"] == "sleep":
            time.sleep(60)
        else:
            sys.exit(fault["how"])


def end_gently(_number: int, _frame: Any) -> None:
    seconds, status = OPTIONS["sigterm"][RANK]
    say("told", step=0)
    time.sleep(seconds)
    say("gently", step=0)
    os._exit(status)


def workers(loader: Any) -> list[int]:
    """Process ids of the data loader's workers."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()] if loader is not None else []


def train() -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 32))
    model = nn.parallel.DistributedDataParallel(net)
    torch.manual_seed(RANK)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = None
    if count := OPTIONS.get("workers", 0):
        data = TensorDataset(torch.arange(4096.0).repeat(32, 1).T / 4096)
        loader = gemini.StatefulLoader(data, batch_size=4, seed=1, rank=RANK, world=WORLD, num_workers=count)
    stumble(0)
    checkpointer = gemini.Checkpointer(model, optimizer, loader=loader)
    start = checkpointer.resume()
    say("resumed", step=start, state=checkpointer.report()["state"])
    lost: list[bytes] = []
    batches = iter(loader.iterate_forever()) if loader is not None else None
    for step in range(start + 1, OPTIONS["steps"] + 1):
        data = torch.full((4, 32), step / 60.0) if batches is None else next(batches)[0]
        loss = model(data).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(OPTIONS["pause_s"])
        if OPTIONS.get("leaks", (-1, 0))[0] == RANK:
            lost.append(b"x" * (OPTIONS["leaks"][1] << 20))
        say("step", step=step, workers=workers(loader))
        stumble(step)
        checkpointer.step()
    checkpointer.close()
    return xxhash.xxh3_64(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "sigterm" in OPTIONS:
        signal.signal(signal.SIGTERM, end_gently)
    dist.init_process_group("gloo")
    digest = train()
    dist.destroy_process_group()
    say("done", digest=digest)
    stumble(-1)
