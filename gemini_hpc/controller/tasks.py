"""Tasks in the background that must not die unnoticed: a death is logged, told, and followed by a new start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gemini_hpc import clock

log = logging.getLogger("gemini_hpc.controller")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
LASTED_S = 60.0  # a life so long was a good one: the next pause is short again
Died = Callable[[str], None]


def tell(died: Died, why: str) -> None:
    """Where a death cannot be told (a full disk) the log has it; that ends nothing else."""
    try:
        died(why)
    except Exception:
        log.exception("event=task-death-not-told detail=%s", why)


async def keep(name: str, work: Callable[[], Awaitable[None]], died: Died) -> None:
    """Run `work` until it returns; where it raises, tell `died` and begin again after a pause that doubles."""
    pause_s = FIRST_PAUSE_S
    while True:
        began = clock.monotonic()
        try:
            return await work()
        except Exception as exc:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from exc  # a fault on the way out is no reason to begin again
            log.exception("event=task-died task=%s", name)
            tell(died, f"{name}: {type(exc).__name__}")  # its own text may be a user's
        if clock.monotonic() - began > LASTED_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)


def start(name: str, work: Callable[[], Awaitable[None]], died: Died) -> asyncio.Task[None]:
    """The same as a task; cancel it to end it."""
    return asyncio.create_task(keep(name, work, died), name=name)
