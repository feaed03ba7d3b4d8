"""Replicas on nodes that the job has left: a job that was requeued elsewhere still comes back from memory.

Asked only when the nodes of the new incarnation cannot serve by themselves; agents that are detached tell what
they hold to a newer incarnation of their own job and uid, and serve pulls of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gemini_hpc.agent.ports import candidates
from gemini_hpc.wire import peer
from gemini_hpc.wire.handshake import HandshakeError
from gemini_hpc.wire.link import LinkClosed, connect_any

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent

ANSWER_S = 2.0
DIAL_S = 1.0
# Of all that a prolog waits: the rest is for dialling, and for the round itself.
ASK_PART, MAX_ASK_S = 0.4, 4.0
MAX_HOSTS = 1024


async def inventories(agent: Agent, former: Iterable[str]) -> tuple[peer.InventoryRecord, ...]:
    """What agents outside the allocation hold: on hosts of the former map, and on those that the controller knows."""
    ports = await agent.reporter.holders(min(MAX_ASK_S, ASK_PART * agent.settings.attach_timeout_s))
    hosts = [h for h in dict.fromkeys([*former, *ports]) if h not in agent.hosts][:MAX_HOSTS]
    found = await asyncio.gather(*(_ask(agent, host, ports.get(host)) for host in hosts))
    return tuple(record for record in found if record is not None)


async def _ask(agent: Agent, host: str, known: int | None) -> peer.InventoryRecord | None:
    mesh = agent.mesh
    if mesh is None:
        return None
    ports = [known] if known else candidates(agent.settings, agent.job)
    try:
        link, _ = await connect_any(agent.address_of(host), ports, lambda: mesh.client(host, "inventory"), DIAL_S)
    except (OSError, HandshakeError):
        return None
    try:
        async with asyncio.timeout(ANSWER_S):
            link.send(peer.Collect(0, ""))
            answer = await link.receive()
    except (LinkClosed, TimeoutError):
        return None
    finally:
        link.abort()
    if isinstance(answer, peer.InventoryUp) and len(answer.records) == 1 and answer.records[0].host == host:
        return answer.records[0]
    return None
