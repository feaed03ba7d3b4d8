"""Threads for transfers that last as long as an incarnation.

In asyncio's few threads such transfers would block digests and pulls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

R = TypeVar("R")


async def beside(name: str, work: Callable[[], R]) -> R:
    """Run `work` in a thread of its own and return its result. Exceptions of `work` are raised here."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[R] = loop.create_future()

    def tell(result: R) -> None:
        if not over.done():
            over.set_result(result)

    def tell_failure(failure: Exception) -> None:
        if not over.done():
            over.set_exception(failure)

    def run() -> None:
        with suppress(RuntimeError):  # the loop is closed: the agent ends
            try:
                result = work()
            except Exception as exc:
                loop.call_soon_threadsafe(tell_failure, exc)
            else:
                loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await over
