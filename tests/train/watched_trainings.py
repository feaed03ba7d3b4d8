"""Trainings, each without a `CollectiveMonitor` and then with one that records (see watched.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from gemini_hpc.core.spans import Trace
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor

ITERATIONS = 4
CPU = torch.device("cpu")


def everywhere(ranks: list[int]) -> bool:
    return True


def across(ranks: list[int]) -> bool:
    """Nodes of two ranks each."""
    return len({rank // 2 for rank in ranks}) > 1


def digest(tensors: list[torch.Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for t in tensors:
        whole = t.full_tensor() if hasattr(t, "full_tensor") else t
        hasher.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))


class Training:
    """The same training without a watch, then with one that records."""

    def __init__(self, on_network: Callable[[list[int]], bool] = everywhere, bytes_per_s: float = 1e9) -> None:
        self.watch = CollectiveMonitor(on_network, bytes_per_s)
        self.traces: list[Trace] = []
        self.counts: list[int] = []

    def run(self, make: Callable[[], tuple[nn.Module, Callable[[nn.Module], None]]]) -> dict[str, Any]:
        digests = []
        for watched in (False, True):
            model, step = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if watched:
                self.watch.start()
                self.watch.recording = True
                self.watch.mark()
            for _ in range(ITERATIONS):
                step(model)
                if watched:
                    self.watch.record_gate_reached()
                optimizer.step()
                optimizer.zero_grad()
                if watched:
                    self.counts.append(self.watch.launched)
                    trace = self.watch.mark()
                    assert trace is not None, self.watch.problem
                    self.traces.append(trace)
            quiet = self.watch.wait_span(0, 5.0)
            self.watch.stop()
            digests.append(digest(list(model.parameters())))
        return {
            "digests": digests,
            "counts": self.counts,
            "problem": self.watch.problem,
            "quiet": quiet,
            "traces": self.traces,
        }


def backward(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    width = next(m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    model(torch.randn(8, width, generator=generator)).square().mean().backward()


def ddp() -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    def make() -> tuple[nn.Module, Callable[[nn.Module], None]]:
        return DistributedDataParallel(layers(10, 20, 30, 40), bucket_cap_mb=1e-3), backward

    return Training().run(make)


def sharded() -> dict[str, Any]:
    """FSDP2 on two ranks, HSDP on four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (2,))

    def step(model: nn.Module) -> None:
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def make() -> tuple[nn.Module, Callable[[nn.Module], None]]:
        model = layers(8, 16, 32)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh), step

    return Training(across if dist.get_world_size() == 4 else everywhere).run(make)


def tensor_parallel() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))

    def step(model: nn.Module) -> None:
        model(torch.ones(8, 8, requires_grad=True)).square().mean().backward()

    def make() -> tuple[nn.Module, Callable[[nn.Module], None]]:
        model = layers(8, 16, 8)
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}), step

    return Training().run(make)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return grad


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layers(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(Slow.apply(x))


def pipeline() -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()

    def make() -> tuple[nn.Module, Callable[[nn.Module], None]]:
        model = Stage()
        stage = PipelineStage(model, rank, 2, CPU)
        schedule = Schedule1F1B(stage, 3, loss_fn=lambda y, target: (y - target).square().mean())

        def step(model: nn.Module) -> None:
            if rank == 0:
                schedule.step(torch.ones(30, 100))
            else:
                schedule.step(target=torch.zeros(30, 100))

        return model, step

    # 10 x 100 numbers at a time: 10 ms
    return Training(bytes_per_s=4e5).run(make)


def compiled() -> dict[str, Any]:
    from torch.distributed import _functional_collectives as fc

    def double(x: torch.Tensor) -> torch.Tensor:
        return fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    program = torch.compile(double, backend="aot_eager", fullgraph=True)
    watch = CollectiveMonitor(everywhere)
    watch.start()
    counts, sums = [], []
    for _ in range(3):
        watch.mark()
        sums.append(program(torch.ones(3)).sum().item())
        counts.append(watch.launched)
    watch.stop()
    return {"counts": counts, "sums": sums, "problem": watch.problem}
