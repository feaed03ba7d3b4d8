"""Settings by which the user chooses how the copies of a training travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gemini_hpc.core.numbers import check_argument, check_count, check_overhead

Kind = Literal["auto", "host", "nccl"]
Scheme = Literal["none", "blocking", "naive", "background", "no_pipeline", "gemini"]

# Size of a chunk over NCCL unless the user sets one. It cannot follow the link: the buffers are made before.
DEVICE_CHUNK_BYTES = 8 << 20
LEAST_CHUNK_BYTES = 4096


@dataclass(frozen=True)
class Traffic:
    """Settings for how the copies of a training travel; the defaults suit most trainings.

    Args:
        transport: Carrier of the copies. "host": from agent to agent, out of the slots, with no thread of the
            training on the network. "nccl": from GPU to GPU; not run between two GPUs so far. Where NCCL is
            unavailable all ranks use "host", and one line on stderr gives the reason. "auto" is "host".
        every: Save each j-th version only; 0: as often as the idle spans allow.
        overhead: Largest share of the training's time that versions may cost, between 0 and 1. Where the idle spans
            are too small, or the capture in step() takes too long, fewer versions are saved (GEMINI paper, section
            5.3).
        mu: Share of each idle span that plans use, 0 to 1 (Algorithm 2).
        chunk_bytes: Largest chunk in bytes; 0: fitted to the link.
        buffers: Number of chunks in flight at a time (p in section 5.2).
        scheme: "gemini": send in the idle spans of the training's own traffic. The other schemes exist for
            comparison.

    Raises:
        ValueError: If a setting is out of its range or unknown.
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
        if self.chunk_bytes != 0:
            wanted = f"0 (fitted to the link), or a whole number, {LEAST_CHUNK_BYTES} or more"
            check_argument("chunk_bytes", self.chunk_bytes, wanted, lambda n: n >= LEAST_CHUNK_BYTES, whole=True)
        check_argument("mu", self.mu, "a share of an idle span, above 0 and at most 1", lambda mu: 0 < mu <= 1)
        check_count("buffers", self.buffers, 1)
        check_count("every", self.every, 0)
        check_overhead(self.overhead)

    @property
    def device_chunk_bytes(self) -> int:
        """Return the size of a chunk over NCCL in bytes."""
        return self.chunk_bytes or DEVICE_CHUNK_BYTES


def check_scheme(scheme: str) -> None:
    """Check that a scheme is known.

    Raises:
        ValueError: If the scheme is unknown.
    """
    if scheme not in get_args(Scheme):
        raise ValueError(f"scheme is {scheme!r}: wanted one of {', '.join(get_args(Scheme))}")
