"""Fixtures: jobs of fake agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
