"""In which order this rank has enqueued its operations: the same on all ranks, or they wait for each other."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

_KEPT = 1024
_FIELDS = struct.Struct("<8Q")


class Launch(NamedTuple):
    """One operation of ours. launched: collectives that the training had launched in this iteration (counted from the
    version's step()); the other fields name the chunk. All are the same on every rank."""

    version: int
    iteration: int
    past_gate: bool
    launched: int
    chunk: int
    replica: int
    offset: int
    size: int


class LaunchLog:
    """The newest launches, and a hash over all of them."""

    def __init__(self) -> None:
        self.newest: deque[Launch] = deque(maxlen=_KEPT)
        self.count = 0
        self._hash = b""

    def add(self, launch: Launch) -> None:
        """It is enqueued now."""
        self.newest.append(launch)
        self.count += 1
        self._hash = blake2b(self._hash + _FIELDS.pack(*launch), digest_size=8).digest()

    def word(self) -> tuple[int, int]:
        """(count, hash of 63 bits): to be compared at the same version on all ranks."""
        return self.count, int.from_bytes(self._hash, "little") >> 1


def pack(word: tuple[int, int]) -> list[int]:
    """For a round that finds the largest of each number: with the negatives, the smallest come out as well."""
    return [word[0], -word[0], word[1], -word[1]]


def unequal(rounds: Sequence[int]) -> str:
    """Whether the ranks' words differed, as a sentence; '' if not. rounds: what came out for `pack`."""
    most, least, high, low = rounds[0], -rounds[1], rounds[2], -rounds[3]
    if most != least:
        return f"the ranks have enqueued between {least} and {most} operations over NCCL at the same version"
    if high != low:
        return f"the ranks have not enqueued their {most} operations over NCCL at the same places of the training"
    return ""
