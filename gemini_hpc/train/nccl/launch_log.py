"""Log of the order in which this rank enqueues its operations; ranks with different orders wait for each other."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

_KEPT = 1024
_FIELDS = struct.Struct("<8Q")


class EnqueuedOperation(NamedTuple):
    """An enqueued operation of ours. All fields are the same on every rank.

    Attributes:
        version: The version.
        iteration: Iteration since the version's step().
        past_gate: Whether the optimizer has begun in this iteration.
        launched: Collectives that the training had launched in this iteration.
        chunk: Number of the chunk.
        replica: The chunk's replica.
        offset: First byte of the chunk.
        size: Bytes of the chunk.
    """

    version: int
    iteration: int
    past_gate: bool
    launched: int
    chunk: int
    replica: int
    offset: int
    size: int


class LaunchLog:
    """The newest launches, and a hash over all launches."""

    def __init__(self) -> None:
        self.newest: deque[EnqueuedOperation] = deque(maxlen=_KEPT)
        self.count = 0
        self._hash = b""

    def add(self, launch: EnqueuedOperation) -> None:
        """Record an operation that is enqueued now."""
        self.newest.append(launch)
        self.count += 1
        self._hash = blake2b(self._hash + _FIELDS.pack(*launch), digest_size=8).digest()

    def summarize(self) -> tuple[int, int]:
        """Return (count, hash of 63 bits), to be compared at the same version on all ranks."""
        return self.count, int.from_bytes(self._hash, "little") >> 1


def pack(word: tuple[int, int]) -> list[int]:
    """Return the numbers of a word for a round of maxima; the negated numbers yield the minima."""
    return [word[0], -word[0], word[1], -word[1]]


def describe_difference(rounds: Sequence[int]) -> str:
    """Return a sentence on how the ranks' words differ; '' if they do not.

    Args:
        rounds: Result of the round for the numbers of `pack`.
    """
    most, least, high, low = rounds[0], -rounds[1], rounds[2], -rounds[3]
    if most != least:
        return f"the ranks have enqueued between {least} and {most} operations over NCCL at the same version"
    if high != low:
        return f"the ranks have not enqueued their {most} operations over NCCL at the same places of the training"
    return ""
