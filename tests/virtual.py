"""Coroutines in virtual time, as in `tests/sim`: nothing really waits, and load does not change what comes first."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from sim.kernel import Clock, SimLoop

from gemini_hpc import clock

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """As `asyncio.run`, for what needs neither sockets nor threads. Raises `sim.kernel.Stuck` where nothing is left
    that could happen."""
    loop = SimLoop(seed)
    clock.use(Clock(loop))
    try:
        return loop.run_until_complete(coroutine)
    finally:
        clock.use(None)
        loop.close()
