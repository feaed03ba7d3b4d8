"""Fixtures: jobs of fake agents, and of real ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.wire import munge

from .agents import RealJob
from .fake_agent import FakeJob


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
def real_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RealJob]]:
    """real_job(nodes, m, tier=...): its agents must have had no trouble of their own."""
    monkeypatch.setattr(munge, "encode", lambda payload, *, for_uid: payload)
    monkeypatch.setattr(munge, "decode", lambda credential: (credential, os.geteuid()))
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
