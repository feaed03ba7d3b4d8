"""One rank of a training that saves with torch.distributed.checkpoint; a `program` of tests/train/worker.py."""

from __future__ import annotations

import gc
import json
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import gemini_hpc as gemini
from gemini_hpc.client.agent_connection import AgentRefused
from gemini_hpc.integrations.dcp import GeminiReader, GeminiWriter, close
from gemini_hpc.integrations.session import StackSession
from tests.train.worker import digest


class App(Stateful):
    """Model, optimizer and step, as DCP's tutorials have them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, growth: int) -> None:
        self.model, self.optimizer, self.step, self.growth = model, optimizer, 0, growth

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        words = {"a": [1, "two"], "b": None, "grows": bytes(self.step * self.growth)}
        return {"model": model, "optimizer": optimizer, "step": self.step, "words": words, "none": torch.empty(0, 3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["words"] == {"a": [1, "two"], "b": None, "grows": bytes(state["step"] * self.growth)}
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.step = state["step"]


class Generator(Stateful):
    """Of torch, in this process."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["state"])


def build(kind: str, world: int, width: int) -> nn.Module:
    net = nn.Sequential(
        nn.Embedding(53, width),
        nn.Linear(width, 3 * width),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(3 * width, width, bias=False),
        nn.LayerNorm(width),
        nn.Linear(width, 53),
    )
    if kind == "ddp":
        return DistributedDataParallel(net) if world > 1 else net
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for number in (1, 4):
        fully_shard(net[number], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def watch(fails: bool) -> list[int]:
    """Which shards this process fetches. fails: the first cannot be had."""
    fetch, fetched = StackSession._fetch, list[int]()

    def noted(self: StackSession, rank: int) -> Any:
        fetched.append(rank)
        if fails and len(fetched) == 1:
            raise AgentRefused("not this time")
        return fetch(self, rank)

    StackSession._fetch = noted  # type: ignore[method-assign]
    return fetched


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 53, (4, 9), generator=numbers)
    return tokens[:, :-1], tokens[:, 1:]


def main(o: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = train(o)
    print(json.dumps(told), flush=True)
    if o.get("die_at"):
        os._exit(3)
    gc.collect()
    dist.destroy_process_group()


def train(o: dict[str, Any]) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(o.get("seed", 0))
    model = build(o["kind"], world, o.get("width", 32))
    torch.manual_seed(o.get("seed", 0) + 100 * rank + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    app = App(model, optimizer, o.get("growth", 0))
    state: dict[str, Any] = {"app": app}
    if o.get("generators", True):
        state[f"generator{rank}"] = Generator()
    fetched = watch(o.get("fetch_fails") == rank)
    reader = GeminiReader()
    label = f"step-{reader.version}" if o.get("labels") else None
    if reader.version:
        dcp.load(state, checkpoint_id=label, storage_reader=reader)
    beside = gemini.Checkpointer(model, optimizer, name="steps") if o.get("beside") else None
    start = app.step
    loaded = digest(model, optimizer)
    losses, saved = {}, []
    pending: Future[Any] | None = None
    group = dist.new_group(backend="gloo") if o.get("asynchronous") else None
    for step in range(start + 1, o["steps"] + 1):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if step == o.get("odd_at"):  # of a type that no slot can have
            state["odd"] = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        else:
            state.pop("odd", None)
        optimizer.step()
        losses[step] = loss.item().hex()
        app.step = step
        if beside is not None:
            beside.step()
        writer = GeminiWriter(seal_timeout_s=o.get("seal_timeout_s", 10.0))
        label = f"step-{step}" if o.get("labels") else None
        if o.get("asynchronous"):
            if pending is not None:
                pending.result()
            pending = dcp.async_save(state, checkpoint_id=label, storage_writer=writer, process_group=group)
        else:
            dcp.save(state, checkpoint_id=label, storage_writer=writer)
            saved.append(writer.version)
        if step == o.get("read_at"):
            again = GeminiReader()
            before = digest(model, optimizer)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            dcp.load(state, storage_reader=again)
            assert (again.version, digest(model, optimizer)) == (step, before)
        if step == o.get("pause_at"):
            (Path(o["paused"]) / str(rank)).touch()
            while not (Path(o["paused"]) / "go").exists():
                time.sleep(0.02)
        if step > o.get("pause_at", o["steps"]):
            time.sleep(0.3)
        if step == o.get("die_at"):
            break
    if pending is not None:
        pending.result()
    told = {"rank": rank, "start": start, "losses": losses, "saved": saved, "id": reader.checkpoint_id}
    told["fetched"] = fetched
    told |= {"loaded": loaded, "digest": digest(model, optimizer)}
    if beside is not None:
        told["beside"] = beside.report()["state"]
        beside.close()
    if not o.get("die_at"):
        close()
    return told
