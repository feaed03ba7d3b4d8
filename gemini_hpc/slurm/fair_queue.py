"""Fair queue and budgets per user, so that one user's traffic cannot block another's.

They implement the requirement believe-slurm.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import ContextVar

from gemini_hpc.wire.rate_limit import RateLimit

# The uid on whose behalf the controller works now; None: its own behalf. Tasks inherit it from their creator.
BEHALF: ContextVar[int | None] = ContextVar("behalf", default=None)

_MAX_BUCKETS = 1024


class FairGate:
    """A semaphore with one queue per user, served in turn, so that no user's requests delay another's."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._queues: dict[int | None, deque[asyncio.Future[None]]] = {}

    async def __aenter__(self) -> None:
        if self._free and not self._queues:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(BEHALF.get(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass the free place to the next user in turn."""
        while self._queues:
            user = next(iter(self._queues))
            queue = self._queues.pop(user)
            turn = queue.popleft()
            if queue:
                self._queues[user] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class PerUser:
    """Token buckets, one per user; a bucket that has refilled is forgotten."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._buckets: dict[int, RateLimit] = {}

    def take_tokens(self, uid: int, count: float = 1.0) -> bool:
        """Take `count` tokens from this user's bucket; return whether they were available."""
        if uid not in self._buckets and len(self._buckets) >= _MAX_BUCKETS:
            self._buckets = {u: b for u, b in self._buckets.items() if not b.full}
        return self._buckets.setdefault(uid, RateLimit(self._per_s, self._burst)).take_tokens(count)
