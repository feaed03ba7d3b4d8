"""Ending local ranks of a training that has gone on elsewhere (SITE 6): the one case in which protection stops one.

A node that is cut off, not dead, goes on computing. Its ranks are ended when the controller says that their job is
over or runs elsewhere, or when this agent has lost all peers *and* the controller for `self_fence_s`.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from gemini_hpc import clock

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent
    from gemini_hpc.agent.local import Client

_GRACE_S = 2.0
_SEARCH_S = 10.0


class SelfFence:
    """Watches for being cut off; `look` is called a few times a second."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._alone_since: float | None = None
        self._asking: asyncio.Task[None] | None = None

    def _alone(self) -> bool:
        agent = self._agent
        lost = agent.mesh is not None and len(agent.hosts) > 1 and set(agent.mesh.links) <= agent.mesh.dead
        return lost and not agent.detached and agent.reporter.configured and not agent.reporter.connected

    def look(self) -> None:
        """End the local ranks once this node has been alone for too long."""
        limit_s = self._agent.settings.self_fence_s
        if not limit_s or not self._alone():
            self._alone_since = None
            return
        now = clock.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since < limit_s or not self.ranks() or (self._asking and not self._asking.done()):
            return
        # The controller may be there again without having been dialled yet.
        if self._agent.reporter.refused_at > self._alone_since:
            self._asking = self._agent.spawn(self._end_if_nobody(limit_s))

    async def _end_if_nobody(self, limit_s: float) -> None:
        """The partners of a large job's node can all have died while hundreds of its peers are there."""
        mesh = self._agent.mesh
        since, somebody = self._alone_since, mesh is not None and await mesh.anybody(_SEARCH_S)
        if somebody:
            self._alone_since = None
        elif since is not None and since == self._alone_since and self._alone():
            self._alone_since = clock.monotonic()
            reason = f"no peer and no controller for {limit_s:g} s: the job goes on elsewhere"
            self._agent.log("self_fenced", detail=reason)
            await self.end_ranks()

    def ranks(self) -> set[Client]:
        """Processes on this node that train now: those that have said hello, and nobody else."""
        clients = [c for s in self._agent.sets for c in s.present.values()]
        return {c for c in clients if not c.closed.is_set()}

    async def end_ranks(self) -> None:
        """SIGTERM, and SIGKILL for what is still connected after a moment; returns when none is left."""
        for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            for client in self.ranks():
                client.signal(number)
            deadline = clock.monotonic() + wait_s
            while self.ranks() and clock.monotonic() < deadline:
                await asyncio.sleep(0.02)
