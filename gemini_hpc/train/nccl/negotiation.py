"""Negotiation in the first `step()`: either all ranks use NCCL, or none does, and the reason is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from gemini_hpc.format.slot_header import SlotLayout
from gemini_hpc.train.device.interface import Broken, Communicator, Device
from gemini_hpc.train.nccl import platform
from gemini_hpc.train.nccl.exchange import Links
from gemini_hpc.train.nccl.platform import Platform


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message to all others.

    Attributes:
        tensor_offset: Offset of the tensor area of its shard, in bytes.
        tensor_bytes: Size of the area.
        refusal: Reason why the rank cannot use NCCL; '' if it can.
        unique_id: Id of the communicator, from rank 0 only.
    """

    tensor_offset: int = 0
    tensor_bytes: int = 0
    refusal: str = ""
    unique_id: bytes = b""


@dataclass(frozen=True)
class Joined:
    """A rank's end of the communicator.

    Attributes:
        platform: The platform.
        device: The rank's device.
        communicator: The communicator over all ranks.
        links: Senders, receivers and sizes.
        offsets: Offset of the tensor area of each rank's shard, in bytes.
        small_capacity: Bytes for the small state in this rank's shard.
    """

    platform: Platform
    device: Device
    communicator: Communicator
    links: Links
    offsets: tuple[int, ...]
    small_capacity: int


class Meeting:
    """A rank's part in the negotiation for one training."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._platform: Platform | None = None

    def propose(self, tensors: Sequence[torch.Tensor], layout: SlotLayout) -> Proposal:
        """Return this rank's proposal to all ranks.

        Args:
            tensors: Tensors that this rank protects.
            layout: Layout of its shard.
        """
        unique_id = b""
        try:
            self._platform = platform.make()
            refusal = self._platform.explain_refusal(tensors)
            if not refusal and self._rank == 0:
                unique_id = self._platform.create_unique_id()
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        return Proposal(layout.tensor_offset, layout.tensor_bytes, refusal, unique_id)

    def connect(
        self, proposals: Sequence[Proposal], targets: Sequence[Sequence[int]], layout: SlotLayout
    ) -> tuple[Joined | None, str]:
        """Connect to all ranks. Return this rank's end, or the reason why there is none.

        Collective; called only where no rank refuses.
        """
        assert self._platform is not None
        links = Links(tuple(tuple(t) for t in targets), tuple(p.tensor_bytes for p in proposals))
        try:
            device = self._platform.find_device()
            made = self._platform.connect(device, self._rank, links, proposals[0].unique_id)
        except (Broken, RuntimeError, OSError) as error:
            return None, f"rank {self._rank}: {error}"
        offsets = tuple(p.tensor_offset for p in proposals)
        return Joined(self._platform, device, made, links, offsets, layout.small_capacity), ""


def find_refusal(proposals: Sequence[Proposal]) -> str:
    """Return the first rank's refusal; '' if there is none."""
    found = [(rank, p.refusal) for rank, p in enumerate(proposals) if p.refusal]
    return f"rank {found[0][0]}: {found[0][1]}" if found else ""


Exchange = Callable[[Proposal], list[Proposal]]


def negotiate(
    rank: int,
    tensors: Sequence[torch.Tensor],
    layout: SlotLayout,
    targets: Sequence[Sequence[int]],
    all_ranks: Exchange,
) -> tuple[Joined | None, str]:
    """Negotiate with all ranks. Collective. Return this rank's end, or the reason why there is none.

    Args:
        rank: This rank.
        tensors: Tensors that this rank protects.
        layout: Layout of its shard.
        targets: For each rank, the ranks that keep its copies.
        all_ranks: Gives every rank the proposals of all ranks.
    """
    meeting = Meeting(rank)
    proposals = all_ranks(meeting.propose(tensors, layout))
    if reason := find_refusal(proposals):
        return None, reason
    joined, problem = meeting.connect(proposals, targets, layout)
    if reason := next((p.refusal for p in all_ranks(Proposal(refusal=problem)) if p.refusal), ""):
        if joined is not None:
            joined.communicator.abort()
        return None, reason
    return joined, ""
