"""What an agent does beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from gemini_hpc.agent.peers.event_log import Log

T = TypeVar("T")
_SAID = 300


class Spawn(Protocol):
    """How the parts of an agent begin something."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        """Run beside everything else."""


class Tasks:
    """Of one agent."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        """Run beside everything else; a failure is logged and ends nothing."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log("error", detail=repr(task.exception())[:_SAID])
