"""One step that trains several times, one after the other, without names: `python -m tests.train.seeds OPTIONS`.

OPTIONS is a JSON object. log: a file, to which each rank appends lines of JSON; seeds: one training each; steps.
names: of the trainings, "" for none. dies: [index of the training, step, attempt]: all ranks end there by SIGKILL, at
step 0 before the Checkpointer is made, at step -1 when it is closed; dies_with: as soon as this file is there.
resumes: false leaves `resume()` out. closes: the ranks that call `close()`. waits: a file for which all ranks wait
behind the last `close()`. lags: a rank that makes no optimizer step in the last iteration.
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

import gemini_hpc as gemini

from .worker import wait_armed, wait_for_the_last

OPTIONS: dict[str, Any] = json.loads(sys.argv[1])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ.get("GEMINI_ATTEMPT", "0"))


def say(what: str, **more: Any) -> None:
    fd = os.open(OPTIONS["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, (json.dumps({"what": what, "rank": RANK, "attempt": ATTEMPT, **more}) + "\n").encode())
    os.close(fd)


def stumble(index: int, step: int) -> None:
    if OPTIONS.get("dies") == [index, step, ATTEMPT]:
        while "dies_with" in OPTIONS and not Path(OPTIONS["dies_with"]).exists():
            time.sleep(0.02)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def train(index: int, seed: int, name: str) -> None:
    torch.manual_seed(seed)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    stumble(index, 0)
    each = gemini.Traffic(every=1, overhead=0.9)  # a busy machine leaves no version out
    checkpointer = gemini.Checkpointer(
        model, optimizer, **({"name": name} if name else {}), seal_timeout_s=5.0, traffic=each
    )
    start = checkpointer.resume() if OPTIONS.get("resumes", True) else 0
    state = checkpointer.report()["state"]
    say("begins", index=index, step=start, training=checkpointer._session.name, state=state)
    for step in range(start + 1, OPTIONS["steps"] + 1):
        loss = model(torch.full((4, 64), step / 60.0)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if not (step == OPTIONS["steps"] and OPTIONS.get("lags") == RANK):
            optimizer.step()
        time.sleep(OPTIONS.get("pause_s", 0.03))
        if step == OPTIONS["steps"]:
            wait_for_the_last(checkpointer)
        checkpointer.step()
        if step == start + 1:
            wait_armed(checkpointer)
        stumble(index, step)
    state = checkpointer.report()["state"]
    digest = xxhash.xxh3_64(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    if RANK in OPTIONS.get("closes", range(WORLD)):
        checkpointer.close()
    say("ends", index=index, digest=digest, state=state)
    stumble(index, -1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for index, seed in enumerate(OPTIONS["seeds"]):
        train(index, seed, OPTIONS.get("names", [""] * 99)[index])
    while "waits" in OPTIONS and not Path(OPTIONS["waits"]).exists():
        time.sleep(0.02)
    dist.destroy_process_group()
