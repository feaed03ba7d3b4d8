"""Calling survivors into the new incarnation where Slurm did not.

slurmd runs no prolog for a job id that it still remembers. It forgets a requeued job when the new start's credential
comes, but cleans its records at most every 2 s: on a node where another job starts a step just before, the prolog is
skipped, and the survivor's agent never hears of the new incarnation. The replacement's agent, whose prolog has run,
then tells it. A detached agent takes that from its own job and uid only, and only for a later incarnation.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from gemini_hpc.agent.ports import candidates
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.handshake import HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, connect_any

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent

AFTER_S = 0.7  # prologs of one incarnation do not begin at the same moment
DIAL_S, ANSWER_S = 1.0, 2.0


async def call(agent: Agent, attach: local.Attach) -> None:
    """Summon the partners that do not come by themselves, until all agents agree or this incarnation is over."""
    mesh, rounds = agent.mesh, agent.rounds
    assert mesh is not None and rounds is not None
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(AFTER_S):
                await rounds.wait_live(None)
                return
        if agent.mesh is not mesh or agent.detached:
            return
        await asyncio.gather(*(_summon(agent, host, attach) for host in mesh.unlinked()))


async def _summon(agent: Agent, host: str, attach: local.Attach) -> None:
    mesh = agent.mesh
    if mesh is None:
        return
    message = peer.Summons(attach.restart, attach.nodelist, attach.replicas, attach.tier, attach.tier_interval)
    ports = candidates(agent.settings, agent.job)
    try:
        link, _ = await connect_any(agent.address_of(host), ports, lambda: mesh.client(host, "summons"), DIAL_S)
    except (OSError, HandshakeError):
        return
    with suppress(TimeoutError, OSError):
        await link.flush(message)
    link.close()


def may_summon(agent: Agent, restart: int) -> bool:
    """Whether this agent waits to be called into a later incarnation."""
    return agent.detached and 0 <= agent.restart < restart


async def answer(agent: Agent, link: Link) -> None:
    """Take a summons; what it says is checked like a prolog's. Raises `LinkClosed`, TimeoutError."""
    async with asyncio.timeout(ANSWER_S):
        message = await link.receive()
    if not isinstance(message, peer.Summons) or message.restart != link.session.peer_restart:
        raise LinkClosed("wanted a summons")
    if may_summon(agent, message.restart):
        agent.log("summoned", detail=f"by {link.session.peer_host}: no prolog ran here for restart {message.restart}")
        attach = local.Attach(
            agent.job,
            message.restart,
            message.nodelist,
            agent.node,
            message.replicas,
            message.tier,
            message.tier_interval,
        )
        agent.spawn(_enter(agent, attach))


async def _enter(agent: Agent, attach: local.Attach) -> None:
    reply = await agent.attach(attach)
    if isinstance(reply, local.Error):
        agent.complain(f"a summons that cannot be followed: {reply.error}")
