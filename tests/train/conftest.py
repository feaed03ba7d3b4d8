"""Fixtures: jobs of fake agents, and of real ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

import gemini_hpc as gemini
from gemini_hpc.wire import munge

from .agents import RealJob
from .fake_agent import FakeJob
from .launch import Run
from .stopped_clock import Time

STEPS = 40
HOST = {"transport": "host", "seal_timeout_s": 3.0}


@pytest.fixture(autouse=True)
def each_version_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings inside the tests, of milliseconds an iteration, wait for each seal; see `worker.arguments`."""
    usual = gemini.Checkpointer.__init__

    def init(self: gemini.Checkpointer, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("traffic", gemini.Traffic(every=1, overhead=0.99))
        usual(self, *args, **kwargs)

    monkeypatch.setattr(gemini.Checkpointer, "__init__", init)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[[int, int], FakeJob]]:
    """make_job(nodes, m)"""
    jobs: list[FakeJob] = []

    def make(nodes: int, m: int) -> FakeJob:
        directory = tmp_path / f"job{len(jobs)}"
        directory.mkdir()
        jobs.append(FakeJob(directory, nodes, m))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def job(make_job: Callable[[int, int], FakeJob], monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    """One node with one agent, which this process finds: a training of one rank."""
    job = make_job(1, 1)
    monkeypatch.setenv("GEMINI_SOCKET", job.nodes[0].path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return job


@pytest.fixture
def open_munge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(munge, "encode", lambda payload, *, for_uid: payload)
    monkeypatch.setattr(munge, "decode", lambda credential: (credential, os.geteuid(), 0))


@pytest.fixture
def make_agents(tmp_path: Path, open_munge: None) -> Iterator[Callable[..., RealJob]]:
    """Real agents, on the loopback interface."""
    jobs: list[RealJob] = []

    def make(nodes: int, m: int, **more: Any) -> RealJob:
        jobs.append(RealJob(tmp_path / f"real{len(jobs)}", nodes, m, **more))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
    for node in (node for job in jobs for node in job.all.values()):
        log = node.log()
        assert "Traceback" not in log and "event=error" not in log and "exception" not in log, log


@pytest.fixture
def real_job(make_agents: Callable[..., RealJob]) -> Callable[..., RealJob]:
    """real_job(nodes, m, tier=...): the same."""
    return make_agents


class Pause:
    """A gate in mid-training that holds the ranks until the test opens it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory

    def at(self, *steps: int) -> dict[str, Any]:
        """Return the options of a training that stands still after each of these steps."""
        return {"stands_at": steps, "stands_in": str(self._directory)}

    def wait(self, step: int, world: int = 2) -> None:
        """Return when all ranks stand still."""
        files = [self._directory / f"{step}.{rank}" for rank in range(world)]
        until(lambda: all(file.exists() for file in files), 60, every_s=0.01, what=f"all ranks at step {step}")

    def end(self, step: int) -> None:
        (self._directory / f"{step}.go").touch()


@pytest.fixture
def pause(tmp_path: Path) -> Pause:
    return Pause(tmp_path / "paused")


@pytest.fixture
def start(make_agents: Callable[..., RealJob]) -> Iterator[Callable[..., Run]]:
    """Trainings of two ranks beside them."""
    runs: list[Run] = []

    def begin(job: RealJob, **options: Any) -> Run:
        defaults = {"kind": "ddp", "steps": STEPS, "kwargs": HOST}
        runs.append(Run(job, 2, {**defaults, **options}))  # type: ignore[arg-type]
        return runs[-1]

    yield begin
    for process in (p for r in runs for p in r.processes):
        process.signal(signal.SIGKILL)
        process.wait(10)
