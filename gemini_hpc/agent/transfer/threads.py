"""Threads for transfers that last as long as an incarnation.

In asyncio's few threads such transfers would block digests and pulls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress


async def beside(name: str, work: Callable[[], None]) -> None:
    """Run `work` in a thread of its own and return when it has ended. Exceptions of `work` are raised here."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def report_result(failure: Exception | None) -> None:
        if over.done():
            return
        if failure is None:
            over.set_result(None)
        else:
            over.set_exception(failure)

    def run() -> None:
        failure: Exception | None = None
        try:
            work()
        except Exception as exc:
            failure = exc
        with suppress(RuntimeError):  # the loop is closed: the agent ends
            loop.call_soon_threadsafe(report_result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    await over
