"""The source of a pull: an agent that sends bytes of a copy, on connections that the pulling agent opens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import CancelledError

from gemini_hpc.agent.replicas.digest_pool import DigestPool, Urgency
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.transfer.pull import SILENCE_S
from gemini_hpc.agent.transfer.threads import run_beside
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.digest import Pieces
from gemini_hpc.wire import peer
from gemini_hpc.wire.link import BlockingLink, Link, LinkClosed


async def serve(link: Link, pool: DigestPool, find_copy: Callable[[peer.PullAsk], tuple[Copy, Memfd] | bool]) -> None:
    """Answer the `PullAsk`s on a connection, all for the same copy, and close it.

    Args:
        link: The connection.
        pool: Threads that make the digests of pieces.
        find_copy: Returns the copy with its memory, or whether the copy is on its way here.
    """
    try:
        async with asyncio.timeout(SILENCE_S):
            ask = await link.receive()
        if not isinstance(ask, peer.PullAsk):
            return
        found = find_copy(ask)
        if isinstance(found, bool):
            await link.flush(peer.PullHead(None, "on its way there" if found else "not held here", later=found))
            return
        serving = _Serving(ask, *found, pool)
        try:
            blocking = await link.block()
        except BaseException:
            serving.close()
            raise
        await run_beside("gemini-pull-source", lambda: serving.run(blocking), urgent=True)
    except (LinkClosed, TimeoutError, OSError):
        pass
    finally:
        link.abort()


class _Serving:
    """A connection with one copy, and its thread."""

    def __init__(self, first: peer.PullAsk, record: Copy, memory: Memfd, pool: DigestPool) -> None:
        self._first, self._record, self._memory, self._pool = first, record, memory, pool
        self._fd = os.dup(memory.fd)  # still there if the slot is freed meanwhile

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def run(self, link: BlockingLink) -> None:
        """Answer until the other end closes the connection. Close the descriptor then.

        Raises:
            LinkClosed: The other end closes the connection, is silent, or asks for anything else.
            OSError: The connection fails.
        """
        try:
            link.limit_silence(SILENCE_S)
            ask = self._first
            while self._answer(link, ask):
                ask = link.receive(peer.PullAsk)
                if (ask.training, ask.rank, ask.stamp, ask.parity) != self._key:
                    return
        finally:
            self.close()
            link.close()

    @property
    def _key(self) -> tuple[object, ...]:
        return self._first.training, self._first.rank, self._first.stamp, self._first.parity

    def _answer(self, link: BlockingLink, ask: peer.PullAsk) -> bool:
        """Send what is wanted. Return False after a refusal."""
        if not ask.start < ask.end <= self._record.used:
            link.send(peer.PullHead(None, f"bytes {ask.start} to {ask.end} of {self._record.used}"))
            return False
        found = b""
        if ask.digests:
            pieces = Pieces(ask.end - ask.start)
            try:
                reading = self._pool.hash(self._memory, pieces, 0, pieces.count, ask.start, urgency=Urgency.ARRIVING)
                reading.result()
            except (CancelledError, ValueError):  # the agent ends, or the memory has been given back
                link.send(peer.PullHead(None, "no longer held here"))
                return False
            found = pieces.found
        link.send(peer.PullHead(self._record, pieces=found), more=not ask.bare)
        if not ask.bare:
            link.send_file(self._fd, ask.start, ask.end - ask.start)
        return True
