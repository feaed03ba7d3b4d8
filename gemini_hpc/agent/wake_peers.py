"""Calls of survivors into the new incarnation where Slurm made none.

slurmd runs no prolog for a job id that it still remembers. A requeued job is forgotten when the credential of the new
start comes, but slurmd cleans its records at most every 2 s. On a node where another job starts a step just before,
the prolog is skipped. The survivor's agent then never learns of the new incarnation. The replacement's agent, whose
prolog has run, summons it. A detached agent accepts a summons only from its own job and uid, and only for a later
incarnation.

Meanwhile the file `waiting` makes the plugin of the survivor wait for the map (`slurm/await.c`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.handshake import HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, connect_any
from gemini_hpc.wire.ports import list_candidates

AFTER_S = 0.7  # seconds: prologs of one incarnation do not begin at the same moment
DIAL_S, ANSWER_S = 1.0, 2.0  # a host that is up accepts within a round trip, and its agent answers at once


class Wake:
    """An agent's part in summoning peers."""

    def __init__(self, context: AgentContext, attach: Callable[[local.Attach], Awaitable[local.Message]]) -> None:
        """Create this agent's part.

        Args:
            context: The agent's context.
            attach: Makes the agent enter an incarnation.
        """
        self._identity, self._membership, self._attach = context.identity, context.membership, attach
        self._log, self._spawn = context.events, context.spawn

    async def summon_absent(self, incarnation: Incarnation) -> None:
        """Summon absent partners until all agents agree or this incarnation is over."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(AFTER_S):
                    await incarnation.wait_live()
                    return
            if self._membership.incarnation is not incarnation or self._membership.detached:
                return
            await asyncio.gather(*(self._summon(incarnation, host) for host in incarnation.mesh.list_unlinked()))

    async def _summon(self, incarnation: Incarnation, host: str) -> None:
        attach, settings = incarnation.attach, self._identity.settings
        message = peer.Wake(
            attach.restart,
            attach.nodelist,
            attach.replicas,
            attach.tier,
            attach.tier_interval,
            attach.spares,
            attach.lost,
            attach.hang,
            attach.after,
            attach.parity,
            attach.key,
            attach.cluster,
        )
        ports = list_candidates(settings, self._identity.job)
        try:
            link, _ = await connect_any(
                settings.format_address(host), ports, lambda: incarnation.mesh.build_client(host, "wake"), DIAL_S
            )
        except (OSError, HandshakeError):
            return
        with suppress(TimeoutError, OSError):
            await link.flush(message)
        link.close()

    def admits(self, restart: int) -> bool:
        """Return whether this agent waits to be called into a later incarnation."""
        return self._membership.detached and 0 <= self._membership.restart < restart

    async def answer(self, link: Link) -> None:
        """Take a summons. The message is checked like a prolog's.

        Raises:
            LinkClosed: The message is no summons.
            TimeoutError: No message arrives in time.
        """
        async with asyncio.timeout(ANSWER_S):
            message = await link.receive()
        if not isinstance(message, peer.Wake) or message.restart != link.session.peer_restart:
            raise LinkClosed("wanted Wake for the caller's restart, found another message")
        if self.admits(message.restart):
            detail = f"by {link.session.peer_host}: no prolog ran here for restart {message.restart}"
            self._log.log("summoned", detail=detail)
            attach = local.Attach(
                self._identity.job,
                message.restart,
                message.nodelist,
                self._identity.node,
                message.replicas,
                message.tier,
                message.tier_interval,
                message.spares,
                message.lost,
                message.hang,
                message.after,
                message.parity,
                message.key,
                message.cluster,
            )
            self._spawn(self._enter_incarnation(attach))

    async def _enter_incarnation(self, attach: local.Attach) -> None:
        reply = await self._attach(attach)
        if isinstance(reply, local.Error):
            self._log.log_rate_limited(f"cannot join restart {attach.restart}, to which a peer called: {reply.error}")
