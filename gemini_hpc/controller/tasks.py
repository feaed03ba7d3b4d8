"""Background tasks that must not die unnoticed: a death is logged and reported, and the task restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gemini_hpc import clock

log = logging.getLogger("gemini_hpc.controller")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0  # pause before a restart; it doubles each time
LASTED_S = 60.0  # after a life this long, the next pause is short again
Died = Callable[[str], None]


def report_death(died: Died, why: str) -> None:
    """Report a task's death. If that fails (a full disk), log it; no other task ends."""
    try:
        died(why)
    except Exception:
        log.exception("event=task-death-not-told detail=%s", why)


async def supervise(name: str, work: Callable[[], Awaitable[None]], died: Died) -> None:
    """Run `work` until it returns. If it raises, call `died` and start again after a pause that doubles."""
    pause_s = FIRST_PAUSE_S
    while True:
        began = clock.monotonic()
        try:
            return await work()
        except Exception as exc:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from exc  # a fault during cancellation is no reason to start again
            log.exception("event=task-died task=%s", name)
            report_death(died, f"{name}: {type(exc).__name__}")  # only the type: the text may contain a user's input
        if clock.monotonic() - began > LASTED_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)


def start(name: str, work: Callable[[], Awaitable[None]], died: Died) -> asyncio.Task[None]:
    """Start `supervise` as a task. Cancel the task to end it."""
    return asyncio.create_task(supervise(name, work, died), name=name)
