"""Copies on nodes that the job has left: a job that was requeued elsewhere still resumes from memory.

The coordinator asks for them only if the nodes of the new incarnation cannot serve by themselves. Detached agents
report their copies to a newer incarnation of their own job and uid, and serve its pulls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.wire import peer
from gemini_hpc.wire.handshake import HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, connect_any
from gemini_hpc.wire.ports import list_candidates

ANSWER_S = 2.0  # the agent there verifies its copies first
DIAL_S = 1.0  # a host that is up accepts or refuses within a round trip; the round waits
# Part of the prolog's whole wait: the rest is for dialling, and for the round itself.
ASK_PART, MAX_ASK_S = 0.4, 4.0
MAX_HOSTS = 1024


class HolderSource(Protocol):
    """The controller, if there is one, as a source of agents' places."""

    async def find_holders(self, timeout_s: float, job: int = 0) -> dict[str, int]:
        """Return the hosts, with ports, where agents of a job are or have been. Port 0 means any of its ports."""


async def gather_inventories(
    identity: AgentIdentity, incarnation: Incarnation, controller: HolderSource, former: Iterable[str]
) -> tuple[peer.InventoryRecord, ...]:
    """Return the inventories of agents outside the allocation.

    These agents are on hosts of the former map, and on hosts known to the controller.
    """
    ports = await controller.find_holders(min(MAX_ASK_S, ASK_PART * identity.settings.attach_timeout_s))
    hosts = [h for h in dict.fromkeys([*former, *ports]) if h not in incarnation.hosts][:MAX_HOSTS]
    found = await asyncio.gather(*(_ask_agent(identity, incarnation.mesh, host, ports.get(host)) for host in hosts))
    return tuple(record for record in found if record is not None)


async def _ask_agent(
    identity: AgentIdentity, mesh: Mesh, host: str, known: int | None
) -> peer.InventoryRecord | None:
    settings = identity.settings
    ports = [known] if known else list_candidates(settings, identity.job)
    try:
        link, _ = await connect_any(
            settings.format_address(host), ports, lambda: mesh.build_client(host, "inventory"), DIAL_S
        )
        return await request_inventory(link, host)
    except (OSError, HandshakeError, LinkClosed):
        return None


async def request_inventory(link: Link, host: str) -> peer.InventoryRecord | None:
    """Return the inventory that the agent of a host reports, or None if its answer is none. Close the link.

    Raises:
        LinkClosed: The agent closes the link.
        TimeoutError: The agent does not answer in time.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            link.send(peer.Collect(0, ""))
            answer = await link.receive()
    finally:
        link.abort()
    if isinstance(answer, peer.InventoryUp) and len(answer.records) == 1 and answer.records[0].host == host:
        return answer.records[0]
    return None
