"""A rank's identity for its agent, and the registration that gets the memory of a shard from the agent."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.client.agent_connection import AgentClient, AgentRefused
from gemini_hpc.train.device.memory import TensorShard
from gemini_hpc.wire import local


@dataclass(frozen=True)
class RankIdentity:
    """The identity of a rank for its agent."""

    training: str
    rank: int
    world: int
    node_rank: int
    epoch: int


def register(
    client: AgentClient, identity: RankIdentity, rank: int, home: int, total_bytes: int, *, pushed: bool = False
) -> TensorShard:
    """Ask the agent for a shard's slots and map them.

    Args:
        client: The connection to the agent.
        identity: This rank.
        rank: The rank whose shard it is.
        home: Node rank of the shard's home.
        total_bytes: Size of a slot. 0 with `pushed`: as large as the slots are now.
        pushed: The agent of the shard's home fills the slots.

    Raises:
        AgentLost: The agent is gone.
        AgentRefused: The agent refuses, or answers with other slots than those wanted.
    """
    reply, fds = client.request(
        local.Register(
            training=identity.training, rank=rank, world=identity.world, home=home, bytes=total_bytes, pushed=pushed
        ),
        timeout_s=120.0,
    )
    if not isinstance(reply, local.Slots) or reply.bytes != (total_bytes or reply.bytes):
        raise AgentRefused(f"the agent answered a registration of {total_bytes} bytes with {reply}")
    return TensorShard(rank, identity.world, home, reply.bytes, fds, pushed=pushed)
