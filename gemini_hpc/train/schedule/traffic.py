"""How the copies of a training travel, as its user chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gemini_hpc.train.schedule.pacer import SCHEMES, Scheme

Kind = Literal["auto", "host", "nccl"]

# Of a chunk over NCCL, where the user does not say: it cannot follow the link, as its sub-buffers are there before.
DEVICE_CHUNK_BYTES = 8 << 20
LEAST_CHUNK_BYTES = 4096


@dataclass(frozen=True)
class Traffic:
    """How the copies of a training travel. The defaults are good for most.

    Args:
        transport: what carries them. "host": from agent to agent, out of the slots, with no thread of the training on
            the network. "nccl": from GPU to GPU; not run between two so far. Where it cannot be had all ranks use
            "host", and one line on stderr says why. "auto" is "host".
        every: save each j-th version only; 0: as often as the idle spans allow.
        overhead: by what share the training may be slowed at most, 0 to 1. Where the idle spans are too small for
            that, or the capture in step() takes too long, fewer versions are saved (GEMINI paper, section 5.3).
        mu: the share of each idle span that is planned with, 0 to 1 (Algorithm 2).
        chunk_bytes: the largest chunk; 0: as large as is good for the link.
        buffers: chunks that are on their way at a time (p in section 5.2).
        scheme: "gemini": in the idle spans of the training's own traffic. The others are there for comparison.

    Raises:
        ValueError: for what cannot be.
    """

    transport: Kind = "auto"
    every: int = 0
    overhead: float = 0.01
    mu: float = 0.95
    chunk_bytes: int = 0
    buffers: int = 4
    scheme: Scheme = "gemini"

    def __post_init__(self) -> None:
        check_scheme(self.scheme)
        if self.transport not in get_args(Kind):
            wanted = f"wanted one of {', '.join(get_args(Kind))}; without it the agents carry the copies"
            raise ValueError(f"transport is {self.transport!r}: {wanted}")
        if self.chunk_bytes and self.chunk_bytes < LEAST_CHUNK_BYTES:
            wanted = f"wanted 0 (fitted to the link), or at least {LEAST_CHUNK_BYTES}"
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}: {wanted}")
        if not 0 < self.mu <= 1:
            raise ValueError(f"mu is {self.mu}: wanted a share of an idle span, above 0 and at most 1")
        if self.buffers < 1 or self.every < 0 or not 0 < self.overhead < 1:
            raise ValueError("wanted buffers >= 1, every >= 0 and 0 < overhead < 1")

    @property
    def device_chunk_bytes(self) -> int:
        """Of a chunk over NCCL."""
        return self.chunk_bytes or DEVICE_CHUNK_BYTES


def check_scheme(scheme: str) -> None:
    """Raises ValueError for one that is not known."""
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}: wanted one of {', '.join(SCHEMES)}")
