"""Who a rank is for its agent, and how it gets the memory of a shard from there."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.client.agent_connection import AgentClient, AgentRefused
from gemini_hpc.train.device.memory import Shard
from gemini_hpc.wire import local


@dataclass(frozen=True)
class Identity:
    """Who this rank is, for the agent."""

    set: str
    rank: int
    world: int
    node_rank: int
    epoch: int


def register(
    client: AgentClient, me: Identity, rank: int, home: int, total_bytes: int, *, pushed: bool = False
) -> Shard:
    """Ask the agent for a shard's slots and map them. pushed: its home's agent fills them; total_bytes 0 then: as
    large as they are now. Raises AgentLost, AgentRefused."""
    reply, fds = client.request(
        local.Register(set=me.set, rank=rank, world=me.world, home=home, bytes=total_bytes, pushed=pushed),
        timeout_s=120.0,
    )
    if not isinstance(reply, local.Slots) or reply.bytes != (total_bytes or reply.bytes):
        raise AgentRefused(f"the agent answered a registration of {total_bytes} bytes with {reply}")
    return Shard(rank, me.world, home, reply.bytes, fds, pushed=pushed)
