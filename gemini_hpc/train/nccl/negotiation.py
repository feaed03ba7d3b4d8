"""In the first `step()`: all ranks take NCCL, or none does, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from gemini_hpc.format.slot_header import Layout
from gemini_hpc.train.device.interface import Broken, Communicator, Device
from gemini_hpc.train.nccl import platform
from gemini_hpc.train.nccl.exchange import Links
from gemini_hpc.train.nccl.platform import Platform


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: the tensor area of its shard, why it cannot take NCCL, and, of rank 0, the name
    of the communicator."""

    tensor_offset: int = 0
    tensor_bytes: int = 0
    refusal: str = ""
    unique_id: bytes = b""


@dataclass(frozen=True)
class Joined:
    """A rank's end of the communicator. offsets[r]: of the tensor area of rank r's shard; small_capacity: of this
    rank's."""

    platform: Platform
    device: Device
    communicator: Communicator
    links: Links
    offsets: tuple[int, ...]
    small_capacity: int


class Meeting:
    """Of one rank, for one training."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._platform: Platform | None = None

    def propose(self, tensors: Sequence[torch.Tensor], layout: Layout) -> Proposal:
        """For all ranks. tensors: what this rank protects."""
        unique_id = b""
        try:
            self._platform = platform.make()
            refusal = self._platform.refuses(tensors)
            if not refusal and self._rank == 0:
                unique_id = self._platform.unique_id()
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        return Proposal(layout.tensor_offset, layout.tensor_bytes, refusal, unique_id)

    def connect(
        self, proposals: Sequence[Proposal], targets: Sequence[Sequence[int]], layout: Layout
    ) -> tuple[Joined | None, str]:
        """Collective, where nobody refuses: this rank's end, or why there is none."""
        assert self._platform is not None
        links = Links(tuple(tuple(t) for t in targets), tuple(p.tensor_bytes for p in proposals))
        try:
            device = self._platform.device()
            made = self._platform.connect(device, self._rank, links, proposals[0].unique_id)
        except (Broken, RuntimeError, OSError) as error:
            return None, f"rank {self._rank}: {error}"
        offsets = tuple(p.tensor_offset for p in proposals)
        return Joined(self._platform, device, made, links, offsets, layout.small_capacity), ""


def refused(proposals: Sequence[Proposal]) -> str:
    """The first reason, '' if there is none."""
    found = [(rank, p.refusal) for rank, p in enumerate(proposals) if p.refusal]
    return f"rank {found[0][0]}: {found[0][1]}" if found else ""


Exchange = Callable[[Proposal], list[Proposal]]


def meet(
    rank: int, tensors: Sequence[torch.Tensor], layout: Layout, targets: Sequence[Sequence[int]], all_ranks: Exchange
) -> tuple[Joined | None, str]:
    """Collective. all_ranks: gives every rank what each of them says. What is joined, or else why nothing is."""
    meeting = Meeting(rank)
    proposals = all_ranks(meeting.propose(tensors, layout))
    if reason := refused(proposals):
        return None, reason
    joined, problem = meeting.connect(proposals, targets, layout)
    if reason := next((p.refusal for p in all_ranks(Proposal(refusal=problem)) if p.refusal), ""):
        if joined is not None:
            joined.communicator.abort()
        return None, reason
    return joined, ""
