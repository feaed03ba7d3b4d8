"""Killing local ranks of a training that has gone on elsewhere (requirement cut-off-nodes).

Protection stops a training's ranks in no other case. A node that is cut off, not dead, goes on computing. The node's
ranks are killed when the controller reports that their job is over or runs elsewhere. The ranks are also killed when
this agent has lost all peers *and* the controller for `self_fence_s`. The setting `mode` may withhold both.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable

from gemini_hpc import clock
from gemini_hpc.agent.controller_link import ControllerLink
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.settings import ACT, CANARY
from gemini_hpc.wire.local_server import LocalClient

_GRACE_S = 2.0  # a rank's handler of SIGTERM may need a moment; the node is alone, and the job goes on elsewhere
_SEARCH_S = 10.0  # time to dial hundreds of peers, some of which are dead


class SelfFence:
    """A watch for being cut off. `check_alone` is called a few times a second."""

    def __init__(self, context: AgentContext, controller: ControllerLink, trainings: Iterable[Training]) -> None:
        """Create the watch.

        Args:
            context: The agent's context.
            controller: The connection to the controller.
            trainings: The agent's trainings.
        """
        self._limit_s, self._mode = context.settings.self_fence_s, context.settings.mode
        self._membership, self._log, self._spawn = context.membership, context.log, context.spawn
        self._controller, self._trainings = controller, trainings
        self._alone_since: float | None = None
        self._asking: asyncio.Task[None] | None = None
        self._reported = False  # that the mode withholds it

    def _is_alone(self) -> bool:
        incarnation, controller = self._membership.incarnation, self._controller
        if incarnation is None or self._membership.detached:
            return False
        lost = len(incarnation.hosts) > 1 and set(incarnation.mesh.links) <= incarnation.mesh.dead
        return lost and controller.configured and not controller.connected

    def check_alone(self, now: float) -> None:
        """Kill the local ranks once this node has been alone for too long."""
        if not self._limit_s or not self._is_alone():
            self._alone_since, self._reported = None, False
            return
        self._alone_since = self._alone_since or now
        if (
            now - self._alone_since < self._limit_s
            or not self.list_ranks()
            or (self._asking and not self._asking.done())
        ):
            return
        # The controller may be back without having been dialled yet.
        if self._controller.refused_at > self._alone_since:
            self._asking = self._spawn(self._end_if_nobody())

    async def _end_if_nobody(self) -> None:
        """Kill the ranks if no peer at all can be reached.

        In a large job, all partners of a node can have died while hundreds of its peers are alive.
        """
        since, incarnation = self._alone_since, self._membership.incarnation
        if incarnation is not None and await incarnation.mesh.can_reach_anybody(_SEARCH_S):
            self._alone_since = None
        elif since is not None and since == self._alone_since and self._is_alone():
            self._alone_since = clock.monotonic()
            reason = f"no peer and no controller for {self._limit_s:g} s: the job goes on elsewhere"
            await self.fence(reason)

    async def fence(self, reason: str) -> None:
        """End the local ranks, or log that the site's mode withholds it."""
        if self._mode == ACT or (self._mode == CANARY and self._controller.may_act):
            self._log("self_fenced", detail=reason)
            await self.end_ranks()
        elif not self._reported:
            self._reported = True
            self._log("withheld", detail=f'would have ended the ranks here: {reason}; mode = "{self._mode}"')

    def list_ranks(self) -> set[LocalClient]:
        """Return the processes on this node that train now: only those that have said hello."""
        clients = [c for s in self._trainings for c in s.present.values()]
        return {c for c in clients if not c.closed.is_set()}

    async def end_ranks(self) -> None:
        """Send SIGTERM, then SIGKILL to ranks still connected after a moment.

        Return when none is left, or after a bounded wait.
        """
        for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            for client in self.list_ranks():
                client.signal(number)
            deadline = clock.monotonic() + wait_s
            while self.list_ranks() and clock.monotonic() < deadline:
                await asyncio.sleep(0.02)
