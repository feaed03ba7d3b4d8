"""Fixtures: jobs of real agents, and launches of trainings beside them that a test leaves none of."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.train.agents import RealJob
from tests.train.launch import Run
from tests.train.test_host import make_job, open_munge

__all__ = ["launch", "make_job", "open_munge"]
Launch = Callable[..., Run]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """launch(job, world, **options)"""
    runs: list[Run] = []

    def start(job: RealJob | None, world: int, **options: Any) -> Run:
        runs.append(Run(job, world, options))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for process in (p for run in runs for p in run.processes):
        process.signal(signal.SIGKILL)
        process.wait(10)
