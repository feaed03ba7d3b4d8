"""One rank of a training with torchtitan's own parts (checkpoint manager, optimizers, schedulers, data loader) in the
order of its trainer; a `program` of tests/train/worker.py."""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

from tests.train.worker import digest_of


class Tokens(IterableDataset[Any]):
    """Endless; its state is how many it has given."""

    def __init__(self, rank: int) -> None:
        self.rank, self.given = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            numbers = torch.Generator().manual_seed(1000 * self.given + self.rank)
            self.given += 1
            tokens = torch.randint(0, 53, (9,), generator=numbers)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class TrainState:
    """The part of the trainer that its checkpoints have."""

    def __init__(self) -> None:
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def main(o: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = train(o)
    print(json.dumps(told), flush=True)
    gc.collect()
    dist.destroy_process_group()


def train(o: dict[str, Any]) -> dict[str, Any]:
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from gemini_hpc.integrations.torchtitan import GeminiCheckpointManager

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(o.get("seed", 0))
    mesh = init_device_mesh("cpu", (world,))
    first = nn.Sequential(nn.Embedding(53, 32), nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1))
    last = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 53))
    parts = [fully_shard(first, mesh=mesh), fully_shard(last, mesh=mesh)] if o.get("parts", 1) == 2 else []
    parts = parts or [fully_shard(nn.Sequential(first, last), mesh=mesh)]
    torch.manual_seed(o.get("seed", 0) + 100 * rank)
    optimizers = default_adamw(lr=0.01).build(model_parts=parts)
    schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=optimizers, training_steps=o["steps"])
    loader = ParallelAwareDataloader(Tokens(rank), rank, world, batch_size=4)
    state = TrainState()
    checkpointer = GeminiCheckpointManager.Config(
        enable=True,
        interval=o.get("interval", 1000),
        folder="checkpoint",
        last_save_model_only=False,
        **o.get("config", {}),
    ).build(
        dataloader=loader,
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=o["folder"],
    )
    losses = {}
    try:
        loaded = checkpointer.load(step=-1)
        start, batches = state.step, iter(loader)
        while state.step < o["steps"]:
            state.step += 1
            optimizers.zero_grad()
            inputs, labels = next(batches)
            hidden = inputs["input"]
            for part in parts:
                hidden = part(hidden)
            loss = nn.functional.cross_entropy(hidden.flatten(0, 1), labels.flatten())
            loss.backward()
            state.ntokens_seen += labels.numel()
            checkpointer.maybe_wait_for_staging()
            optimizers.step()
            schedulers.step()
            losses[state.step] = loss.item().hex()
            checkpointer.save(state.step, last_step=state.step == o["steps"])
            if state.step == o.get("die_at"):
                os._exit(3)
            if state.step == o.get("raise_at"):
                raise RuntimeError("a bad batch")
    except Exception:
        checkpointer.close()
        raise
    tensors = [p for part in parts for p in part.parameters()]
    tensors += [t for optimizer in optimizers for s in optimizer.state.values() for t in s.values()]
    told = {"rank": rank, "start": start, "loaded": loaded, "losses": losses, "tokens": state.ntokens_seen}
    told |= {"digest": digest_of(tensors), "protected": checkpointer.memory.report()["state"]}
    checkpointer.close()
    return told
