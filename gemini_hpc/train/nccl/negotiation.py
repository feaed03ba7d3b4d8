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
        refusal: Reason why the rank cannot use NCCL, with its number; '' if it can.
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


def negotiate(
    rank: int,
    tensors: Sequence[torch.Tensor],
    layout: SlotLayout,
    targets: Sequence[Sequence[int]],
    all_ranks: Callable[[bytes], list[bytes]],
) -> tuple[Joined | None, str]:
    """Negotiate with all ranks. Collective. Return this rank's end, or the reason why there is none.

    Args:
        rank: This rank.
        tensors: Tensors that this rank protects.
        layout: Layout of its shard.
        targets: For each rank, the ranks that keep its copies.
        all_ranks: Gives every rank the data of all ranks.
    """

    def exchange(proposal: Proposal) -> list[Proposal]:
        return [msgspec.msgpack.decode(word, type=Proposal) for word in all_ranks(msgspec.msgpack.encode(proposal))]

    here, unique_id = platform.make(), b""
    try:
        refusal = here.explain_refusal(tensors)
        if not refusal and rank == 0:
            unique_id = here.create_unique_id()
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    refusal = refusal and f"rank {rank}: {refusal}"
    proposals = exchange(Proposal(layout.tensor_offset, layout.tensor_bytes, refusal, unique_id))
    if reason := _find_refusal(proposals):
        return None, reason
    joined, problem = _connect(here, rank, proposals, targets, layout)
    if reason := _find_refusal(exchange(Proposal(refusal=problem))):
        if joined is not None:
            joined.communicator.abort()
        return None, reason
    return joined, ""


def _connect(
    here: Platform, rank: int, proposals: Sequence[Proposal], targets: Sequence[Sequence[int]], layout: SlotLayout
) -> tuple[Joined | None, str]:
    """Connect to all ranks, none of which refuses. Collective. Return this rank's end, or why there is none."""
    links = Links(tuple(tuple(t) for t in targets), tuple(p.tensor_bytes for p in proposals))
    try:
        device = here.find_device()
        made = here.connect(device, rank, links, proposals[0].unique_id)
    except (Broken, RuntimeError, OSError) as error:
        return None, f"rank {rank}: {error}"
    offsets = tuple(p.tensor_offset for p in proposals)
    return Joined(here, device, made, links, offsets, layout.small_capacity), ""


def _find_refusal(proposals: Sequence[Proposal]) -> str:
    """Return the first rank's refusal; '' if there is none."""
    return next((p.refusal for p in proposals if p.refusal), "")
