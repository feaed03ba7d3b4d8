"""Hand-back of replica memory from a rank to the agent that replaces a dead one.

The new agent has the state and the seals of the dead one, and no copies. The rank says hello to it with `rejoin`. If
the agent is of another incarnation or epoch, the rank gives up protection and reports it.

The rank hands back each slot that it has mapped, its own and others'. For slots that agents fill, stamp, length and
digest come from the commit record. A record of another epoch counts only for the version resumed from. The agent
checks kind and size of the memory, reads the digest, and treats every complete slot as voted for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from gemini_hpc.client.agent_connection import AgentRefused, Exchange
from gemini_hpc.client.mapped_slots import Content, MappedShard
from gemini_hpc.wire import local

K = TypeVar("K", bound=MappedShard[Any])


def hand_back(
    shard: MappedShard[Any], training_name: str, exchange: Exchange, epoch: int, chosen: tuple[int, int]
) -> bool:
    """Hand both slots of a shard to the agent and return whether it accepted both.

    Args:
        shard: Shard whose memory this rank holds.
        training_name: Name of the training.
        exchange: Sends a message with descriptors on the new connection.
        epoch: Epoch of this launch.
        chosen: The (epoch, version) that this launch resumed from.
    """
    for index, slot in enumerate(shard.slots):
        content = slot.read_content()
        if content.epoch != epoch and (content.epoch, content.version) != chosen:
            content = Content()  # a version of an earlier launch; the round voided all that it did not choose (R4)
        reply, _ = exchange(
            local.HandBack(
                training=training_name,
                rank=shard.rank,
                world=shard.world,
                home=shard.home,
                bytes=shard.total_bytes,
                slot=index,
                epoch=content.epoch,
                version=content.version,
                used=content.used,
                digest=content.digest,
                pushed=shard.pushed,
            ),
            [slot.fd],
        )
        if isinstance(reply, local.Error):
            return False
    return True


def map_agent_memory(shard: K, training_name: str, exchange: Exchange, build_keeper: Callable[[list[int]], K]) -> K:
    """Return the shard in the agent's memory: this one, or a new one that `build_keeper` maps from two descriptors.

    Raises:
        AgentRefused: The agent has no memory of this size for the shard.
    """
    reply, fds = exchange(
        local.Register(
            training=training_name,
            rank=shard.rank,
            world=shard.world,
            home=shard.home,
            bytes=shard.total_bytes,
            pushed=shard.pushed,
        )
    )
    if not isinstance(reply, local.Slots) or reply.bytes != shard.total_bytes:
        raise AgentRefused(
            f"the agent has no memory for the shard of rank {shard.rank}: {local.describe_refusal(reply)}"
        )
    now = build_keeper(fds)
    if [os.fstat(s.fd).st_ino for s in now.slots] == [os.fstat(s.fd).st_ino for s in shard.slots]:
        now.close()
        return shard
    now.populate()
    shard.close()
    return now
