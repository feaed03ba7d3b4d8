"""The numbers and names that a user may choose for the checkpoints of a training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from gemini_hpc.train.schedule.pacer import SCHEMES, Scheme
from gemini_hpc.train.state.ownership import Ownership
from gemini_hpc.train.transport.choice import Kind
from gemini_hpc.wire.stored import Tier

# Of a chunk over NCCL, where the user does not say: it cannot follow the link, as its sub-buffers are there before.
DEVICE_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Choices:
    """The numbers and names that a user may choose; see `Checkpointer`. Raises ValueError for what cannot be."""

    name: str
    max_repeated: int
    seal_timeout_s: float
    audit: int
    ownership: Ownership
    hold_s: float
    chunk_bytes: int
    buffers: int
    scheme: Scheme
    every: int
    overhead: float
    transport: Kind = "auto"
    start: str = ""
    tier: Tier = field(default_factory=Tier)
    mu: float = 0.95

    def __post_init__(self) -> None:
        if self.max_repeated not in (1, 2):
            raise ValueError(f"max_repeated is {self.max_repeated}: 1 or 2 is wanted")
        if self.ownership not in get_args(Ownership):
            raise ValueError(f"ownership is {self.ownership!r}: 'split' or 'full' is wanted")
        check_scheme(self.scheme)
        if self.transport not in get_args(Kind):
            raise ValueError(f"transport is {self.transport!r}: one of {', '.join(get_args(Kind))} is wanted")
        if self.chunk_bytes and self.chunk_bytes < 4096:
            raise ValueError(
                f"chunk_bytes is {self.chunk_bytes}: 0 (it follows the link), or 4096 and more is wanted"
            )
        if not 0 < self.mu <= 1:
            raise ValueError(f"mu is {self.mu}: a share of an idle span, above 0 and at most 1, is wanted")
        if self.audit < 0 or self.seal_timeout_s <= 0 or self.hold_s < 0 or not self.name:
            raise ValueError("audit >= 0, seal_timeout_s > 0, hold_s >= 0 and a name are wanted")
        if self.buffers < 1 or self.every < 0 or not 0 < self.overhead < 1:
            raise ValueError("buffers >= 1, every >= 0 and 0 < overhead < 1 are wanted")

    @property
    def device_chunk_bytes(self) -> int:
        """Of a chunk over NCCL."""
        return self.chunk_bytes or DEVICE_CHUNK_BYTES


def check_scheme(scheme: str) -> None:
    """Raises ValueError for one that is not known."""
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}: one of {', '.join(SCHEMES)} is wanted")
