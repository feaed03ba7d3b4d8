"""Trainings whose ranks leave out, repeat or misplace `step()` calls (see watched.py): what they count of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.launch_count import LaunchCount

from .watched_trainings import CPU, backward, everywhere, layers

ITERATIONS, RANDOM = 5, 24
DEEDS = ("skip", "twice", "early")
Batch = Callable[[], None]


def data_parallel() -> Batch:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(layers(10, 20, 30, 40), bucket_cap_mb=1e-3)
    return lambda: backward(model)


def sharded() -> Batch:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = layers(8, 16, 32)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return lambda: backward(model)


def tensor_parallel() -> Batch:
    """Two by two: sharded over one dimension of the mesh, tensor parallel over the other."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(layers(8, 16, 8), mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return lambda: model(torch.ones(8, 8, requires_grad=True)).square().mean().backward()


def pipeline() -> Batch:
    """Two pipelines of two stages, which exchange nothing but messages: no rank launches a collective."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stages"))
    rank = mesh["stages"].get_local_rank()
    stage = PipelineStage(nn.Linear(10, 10), rank, 2, CPU, group=mesh["stages"].get_group())
    schedule = Schedule1F1B(stage, 3, loss_fn=lambda y, target: (y - target).square().mean())
    x = torch.ones(12, 10)
    return lambda: schedule.step(x) if rank == 0 else schedule.step(target=x)


KINDS: dict[str, Callable[[], Batch]] = {
    kind.__name__: kind for kind in (data_parallel, sharded, tensor_parallel, pipeline)
}


def schedules() -> Iterator[dict[tuple[int, int], str]]:
    """Yield the deviations of ranks, by rank and iteration; the same on all ranks."""
    yield {}
    for deed in DEEDS:
        yield {(1, 2): deed}
        yield {(rank, 2): deed for rank in range(4)}
        yield {(0, 1): deed, (3, 3): deed}
    yield {(2, 1): "skip", (2, 3): "twice"}
    draw = random.Random(7)
    for _ in range(RANDOM):
        deeds = {
            (draw.randrange(4), draw.randrange(ITERATIONS)): draw.choice(DEEDS) for _ in range(draw.randint(1, 4))
        }
        yield deeds


def moments() -> dict[str, Any]:
    """Return, by kind and schedule, the batches before each `step()` of this rank, and the rank's moment."""
    rank, found = dist.get_rank(), dict[str, Any]()
    watch = CollectiveMonitor(everywhere)
    watch.rest()
    for name, make in KINDS.items():
        batch, runs = make(), []
        batch()
        for deeds in schedules():
            dist.barrier()
            watch.count = LaunchCount()
            calls: list[tuple[int, int]] = []
            for iteration in range(ITERATIONS):
                deed = deeds.get((rank, iteration), "")
                if deed == "early":
                    calls.append((iteration, watch.count.read().mark))
                batch()
                for _ in range({"": 1, "twice": 2}.get(deed, 0)):
                    calls.append((iteration + 1, watch.count.read().mark))
            runs.append(calls)
        found[name] = runs
    watch.stop()
    return {"runs": found, "problem": watch.problem}


def honest() -> dict[str, Any]:
    """Do what programs do beside their iterations, on some ranks or in other threads: no `step()` is misplaced."""
    rank, world = dist.get_rank(), dist.get_world_size()
    watch = CollectiveMonitor(everywhere)
    watch.rest()
    behind, pair = dist.new_group(), [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    watch.count = LaunchCount()
    batch, marks, saver = data_parallel(), [], None
    for iteration in range(ITERATIONS):
        batch()
        if rank // 2 == iteration % 2:  # an evaluation of half of the ranks
            dist.all_reduce(torch.ones(3), group=pair)
        told: list[Any] = [None] * world if rank == 0 else []
        dist.gather_object(iteration, told or None)
        words = [f"word {iteration}"] if rank == 0 else [None]
        dist.broadcast_object_list(words)
        taken: list[Any] = [None]
        dist.scatter_object_list(taken, list(range(world)) if rank == 0 else None)
        x = torch.ones(2)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, x.clone(), (rank - 1) % world)]
        ):
            work.wait()
        dist.monitored_barrier()
        if saver is None:  # it may be done long before, or long after, the next step on another rank
            saver = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1000), group=behind))
            saver.start()
        elif rank % 2 == iteration % 2:
            saver.join()
        marks.append(watch.count.read().mark)
    assert saver is not None
    saver.join()
    dist.barrier()
    late = watch.count.read().mark
    if rank < 2:  # a receive of which nobody knows yet where it comes from
        dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1))
    unknown = watch.count.read().mark
    watch.stop()
    return {"marks": [*marks, late], "unknown": unknown, "problem": watch.problem}
