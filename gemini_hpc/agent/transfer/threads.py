"""Threads for transfers that last as long as an incarnation, with a lower priority than the training's.

In asyncio's few threads such transfers would block digests and pulls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from gemini_hpc.node import priority


async def beside(name: str, work: Callable[[], None]) -> None:
    """Run `work` in a thread of its own and return when it has ended. Exceptions of `work` are raised here."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def tell(failure: Exception | None) -> None:
        if over.done():
            return
        if failure is None:
            over.set_result(None)
        else:
            over.set_exception(failure)

    def run() -> None:
        failure: Exception | None = None
        priority.lower()
        try:
            work()
        except Exception as exc:
            failure = exc
        with suppress(RuntimeError):  # the loop is closed: the agent ends
            loop.call_soon_threadsafe(tell, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    await over
