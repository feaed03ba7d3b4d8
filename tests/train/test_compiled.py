"""Trainings that are compiled: Dynamo sees nothing of ours, so it neither traces it nor warns of it."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

import gemini_hpc as gemini
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor

from .fake_agent import PROTECTED, FakeJob
from .test_checkpointer import wait_armed, wait_sealed

PACKAGE = str(Path(gemini.__file__).parent)


@pytest.fixture
def ours() -> Iterator[list[str]]:
    """Functions of ours that Dynamo has compiled."""
    found: list[str] = []

    def seen(before: types.CodeType, after: types.CodeType) -> None:
        if before.co_filename.startswith(PACKAGE):
            found.append(f"{before.co_filename}: {before.co_name}")

    torch._dynamo.reset()
    counters.clear()
    handle = convert_frame.register_bytecode_hook(seen)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo ", UserWarning)
        yield found
    handle.remove()
    torch._dynamo.reset()


@pytest.mark.parametrize("whole", [False, True], ids=["the optimizer", "the whole loop body"])
def test_a_compiled_step(job: FakeJob, ours: list[str], whole: bool) -> None:
    torch.manual_seed(1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def backward(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()

    with gemini.Checkpointer(model, optimizer) as ckpt:

        def update() -> None:
            optimizer.step()

        def body(x: torch.Tensor) -> None:
            backward(x)
            optimizer.step()
            ckpt.step()

        compiled = torch.compile(body if whole else update, backend="eager")
        ckpt.resume()
        for step in range(4):
            if whole:
                compiled(torch.rand(2, 8))
            else:
                backward(torch.rand(2, 8))
                compiled()
                ckpt.step()
            if not step:
                wait_armed(ckpt)
        assert ckpt.report()["state"] in PROTECTED
        wait_sealed(job, 4)
    assert ours == []
    breaks = list(counters["graph_break"])
    assert whole or (len(breaks) == 1 and "disable" in breaks[0]), breaks


def test_collectives_beside_compiled_code(ours: list[str], tmp_path: Path) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    monitor = CollectiveMonitor(lambda ranks: True)
    try:
        monitor.start()

        @torch.compile(backend="eager")
        def body(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            torch._dynamo.graph_break()
            dist.all_reduce(y, async_op=True).wait()
            return y + 1

        for _ in range(3):
            body(torch.ones(4))
        assert monitor.launched == 3
    finally:
        monitor.stop()
        dist.destroy_process_group()
    assert ours == []
