"""Fixtures: jobs of real agents, and launches of trainings beside them, of which a test leaves none."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train.conftest import make_agents, open_munge
from train.launch import Run

from .recovery import Recovery, Start

__all__ = ["make_agents", "open_munge"]
Launch = Callable[..., Run]


@pytest.fixture
def make_job(make_agents: Callable[..., Any]) -> Callable[..., Any]:
    return make_agents


@pytest.fixture
def launch() -> Iterator[Launch]:
    """launch(job, world, **options)"""
    runs: list[Run] = []

    def begin(job: Any, world: int, **options: Any) -> Run:
        runs.append(Run(job, world, options))
        return runs[-1]

    yield begin
    for process in (p for run in runs for p in run.processes):
        process.signal(signal.SIGKILL)
        process.wait(10)


@pytest.fixture
def start(launch: Launch) -> Start:
    """start(job, **options): two ranks."""
    return lambda job, **options: launch(job, options.pop("world", 2), **options)


@pytest.fixture
def recovery(make_job: Callable[..., Any], start: Start, tmp_path: Path) -> Recovery:
    return Recovery(make_job(2, 2), start, tmp_path)
