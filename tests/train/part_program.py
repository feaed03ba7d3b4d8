"""A training on some ranks of a world, with ranks that come late to a call, or never. One rank of it.

Options: trains, the ranks that train (null: all, and no group of their own); late, {call: rank}, which stands still
before that call until the test makes the file `go`; steps; die_at; tell_s; directory, where these files are. A rank
that does not train calls nothing at all until the file `over` is there.
"""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_hpc as gemini
from gemini_hpc.train import meeting
from tests.train import worker


def main(o: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    meeting.TELL_S, meeting._POST_S = o["tell_s"], o["tell_s"] / 10
    dist.init_process_group("gloo")
    rank, directory = dist.get_rank(), Path(o["directory"])
    group = dist.new_group(o["trains"]) if o["trains"] else None
    if o["trains"] and rank not in o["trains"]:
        wait_for(directory / "over")
    else:
        print(json.dumps({"rank": rank, **train(o, rank, directory, group)}), flush=True)
        gc.collect()  # see worker.main
        (directory / f"ended.{rank}").touch()
        wait_for(directory / "over")
    dist.destroy_process_group()


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.005)


def train(o: dict[str, Any], rank: int, directory: Path, group: dist.ProcessGroup | None) -> dict[str, Any]:
    def begin(call: str) -> None:
        if o.get("late", {}).get(call) == rank:
            wait_for(directory / "go")

    torch.manual_seed(o.get("seed", 0))
    model = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    peeked = gemini.peek(process_group=group)
    begin("Checkpointer()")
    ckpt = gemini.Checkpointer(model, optimizer, process_group=group, **worker.arguments(o.get("kwargs", {})))
    begin("resume()")
    start = ckpt.resume()
    for step in range(start + 1, o["steps"] + 1):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(step))).square().mean().backward()
        optimizer.step()
        begin("step()")
        ckpt.step()
        if step == start + 1:
            worker.wait_armed(ckpt)
        if step > start + 2:
            worker.wait_for_seal(ckpt, step)
        if step == o.get("die_at"):
            os._exit(1)
    told = {"start": start, "peeked": peeked, "report": ckpt.report()}
    ckpt.close()
    return {**told, "digest": worker.digest(model, optimizer)}
