"""Background tasks of an agent."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from gemini_hpc.agent.peers.event_log import Log

T = TypeVar("T")
_SAID = 300


class Spawn(Protocol):
    """The function with which the parts of an agent start a background task."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        """Run the coroutine in the background."""


class Tasks:
    """The background tasks of one agent."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        """Run the coroutine in the background. A failure is logged and ends nothing else."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log("error", detail=repr(task.exception())[:_SAID])
