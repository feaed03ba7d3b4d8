"""Fixtures: jobs of real agents, as tests/train/test_host.py has them, and trainings that are always ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train.launch import Run
from train.test_host import make_job, open_munge

from .recovery import Recovery, Start

__all__ = ["make_job", "open_munge"]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(job, **options): two ranks."""
    runs: list[Run] = []

    def begin(job: Any, **options: Any) -> Run:
        runs.append(Run(job, options.pop("world", 2), options))
        return runs[-1]

    yield begin
    for process in (p for r in runs for p in r.processes):
        process.signal(signal.SIGKILL)
        process.wait(10)


@pytest.fixture
def recovery(make_job: Callable[..., Any], start: Start, tmp_path: Path) -> Recovery:
    return Recovery(make_job(2, 2), start, tmp_path)
