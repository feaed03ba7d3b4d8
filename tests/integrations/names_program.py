"""Loads by names, with torch.distributed.checkpoint, what a `Checkpointer` of tests/train/worker.py has saved."""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gemini_hpc.integrations.dcp import GeminiReader
from tests.train.worker import Net, digest


def main(o: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net: Any = Net(32, True)
    if o["kind"] == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.5)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    reader = GeminiReader()
    dcp.load(state, storage_reader=reader)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    told = {"rank": dist.get_rank(), "version": reader.version, "digest": digest(net, optimizer)}
    print(json.dumps({**told, "lr": optimizer.param_groups[0]["lr"].hex()}), flush=True)
    del net, optimizer, state, model_state, optimizer_state
    gc.collect()
    os._exit(3)
