"""Replica memory as torch tensors."""

from __future__ import annotations

import mmap
import os

import torch

from gemini_hpc.client import mapped_slots
from gemini_hpc.client.session import RankSession
from gemini_hpc.client.slot_requests import SlotRequests


class TensorSlot(mapped_slots.MappedSlot):
    """A mapped buffer whose `bytes` is a tensor of all its bytes."""

    def __init__(self, fd: int, total_bytes: int) -> None:
        super().__init__(fd, total_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)


class TensorShard(mapped_slots.MappedShard[TensorSlot]):
    """Both slots of a shard."""

    def __init__(
        self, rank: int, world: int, home: int, total_bytes: int, fds: list[int], *, pushed: bool = False
    ) -> None:
        super().__init__(rank, world, home, total_bytes, fds, TensorSlot, pushed=pushed)

    def map_onto(self, fds: list[int]) -> TensorShard:
        """Return the same shard in other memory."""
        return TensorShard(self.rank, self.world, self.home, self.total_bytes, fds, pushed=self.pushed)


class TensorShardOwner(mapped_slots.ShardOwner[TensorShard]):
    """The owner of the shard that one thread of the training fills."""


def register(session: RankSession, rank: int, total_bytes: int, *, pushed: bool = False) -> TensorShard:
    """Have the agent take the memory of a rank's shard, and map it; see `SlotRequests.register`.

    Raises:
        AgentLost: The agent is gone.
        AgentRefused: The agent refuses, or answers with other slots than those wanted.
    """
    slot_bytes, fds = SlotRequests(session, rank).register(total_bytes, pushed=pushed)
    return TensorShard(rank, session.world, session.homes[rank], slot_bytes, fds, pushed=pushed)


def map_copy(fd: int, total_bytes: int) -> torch.Tensor:
    """Map the bytes behind a read-only descriptor as a tensor and close the descriptor.

    Writes to the tensor stay private to the process.
    """
    try:
        return torch.frombuffer(mmap.mmap(fd, total_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(fd)
