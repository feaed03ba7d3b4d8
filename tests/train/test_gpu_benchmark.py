"""`benchmarks.gpu` without a GPU: all of it on a fake device; its spans on one that lags behind this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu, gpuspans
from gemini_hpc.train.device.host_copy import HostCopies

from .fake_gpu import LiveDevice
from .launch import ROOT
from .timed_device import LaggingDevice

pytestmark = pytest.mark.slow


class Sleeping:
    """Four layers of 15 ms, and 5 ms on the network after each."""

    layers = 4

    def __init__(self, device: LaggingDevice) -> None:
        self._device, self._mark = device, device.record_mark()

    def compute(self) -> None:
        self._device.compute(0.015)

    def collective(self) -> None:
        dist.all_reduce(torch.ones(4))

    def optimizer(self) -> None:
        self._device.compute(0.002)
        self._mark = self._device.record_mark()

    def synchronize(self) -> None:
        while not self._mark.query():
            time.sleep(1e-3)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_its_bytes_go_in_spans() -> None:
    device = LaggingDevice(0.005)
    source = torch.arange(1 << 20, dtype=torch.float32)
    into = torch.zeros_like(source)
    found = gpuspans.measure(
        Sleeping(device), device, HostCopies(LiveDevice(3, 1), lambda tensor: True), [(into, source)], 12
    )
    assert torch.equal(into, source)
    assert found.share > 0.5 and found.beside < 0.5, found  # 0 and more where the host is followed; machines are busy
    assert len([s for s in found.spans if s > 0.01]) == 4, found
    assert found.ahead_s > 0, found
    lines: list[str] = []
    gpuspans.rows(found, lambda name, value: lines.append(f"{name} {value}"))
    assert len(lines) == 9


@pytest.mark.slow
def test_all_of_it_runs_on_a_fake_device(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.gpu", "--fake", "--mb", "1", "--iterations", "3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.endswith("fake: not a GPU's figure") for line in lines), done.stdout
    sections = [line.partition(":")[0] for line in lines[2:]]
    assert list(dict.fromkeys(sections)) == [
        "memory",
        "digest",
        "spans",
        "step",
        "snapshot",
        "graphs",
        "self",
        "exchange",
        "nccl",
    ]
    assert "nan" not in done.stdout and "all bytes right" in done.stdout
    assert re.search(r"digest: [1-9]\d* pieces, equal to the processor's +yes", done.stdout), done.stdout


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 1
    said = capsys.readouterr()
    assert not said.out and "nothing was measured" in said.err
