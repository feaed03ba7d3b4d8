"""Threads for transfers.

In asyncio's few threads such transfers would block digests and pulls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from gemini_hpc.node import priority

R = TypeVar("R")


async def run_beside(name: str, work: Callable[[], R], *, urgent: bool = False) -> R:
    """Run `work` in a thread of its own and return its result. Exceptions of `work` are raised here.

    Args:
        name: Name of the thread.
        work: The work.
        urgent: Whether the training waits for it. Otherwise it has a lower priority than the training's threads.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[R] = loop.create_future()

    def set_result_once(result: R) -> None:
        if not over.done():
            over.set_result(result)

    def set_failure_once(failure: Exception) -> None:
        if not over.done():
            over.set_exception(failure)

    def run() -> None:
        if not urgent:
            priority.lower()
        with suppress(RuntimeError):  # the loop is closed: the agent ends
            try:
                result = work()
            except Exception as exc:
                loop.call_soon_threadsafe(set_failure_once, exc)
            else:
                loop.call_soon_threadsafe(set_result_once, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await over
