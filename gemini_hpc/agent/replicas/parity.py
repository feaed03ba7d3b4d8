"""The parity beside a shard of this node: which shards are in it, and one version on its way into a slot.

Each member of the stripe pushes the bytes that this parity has of its shard; they are folded in as they come, in any
order, by a thread for each member. What has been folded in halfway cannot be taken out again: where one of them does
not come to its end, the version is void here (R5), as soon as nobody writes any more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from gemini_hpc import clock
from gemini_hpc.agent.replicas import galois
from gemini_hpc.core.copy import Member
from gemini_hpc.core.slots import Stamp


class Fold:
    """One version. index: of its slot; room: bytes from one block to the next; wanted: ranks of which nothing has
    come; writing: those that are coming."""

    def __init__(self, stamp: Stamp, index: int, view: memoryview, room: int, wanted: Mapping[int, int]) -> None:
        self.stamp, self.index, self.view, self.room = stamp, index, view, room
        self.wanted, self.writing = set(wanted), set[int]()
        self.members: dict[int, Member] = {}
        self.torn = False  # one of them has ended too early
        self.touched = clock.monotonic()  # when the last of them has begun, or ended
        self._lock = threading.Lock()

    @property
    def whole(self) -> bool:
        """All of them are in it."""
        return not self.wanted and not self.writing and not self.torn

    @property
    def of(self) -> tuple[Member, ...]:
        """Those that are in it, in the order of their ranks."""
        return tuple(self.members[rank] for rank in sorted(self.members))

    def add(self, at: int, data: memoryview, by: int = 1) -> None:
        """Fold bytes in, `by` times, from any thread. Raises ValueError for bytes beyond the slot's end."""
        if at + len(data) > len(self.view):
            raise ValueError(f"bytes {at} to {at + len(data)} of a parity of {len(self.view)} bytes")
        with self._lock:
            galois.add(self.view[at : at + len(data)], data, by)


class Parity:
    """homes: node rank by rank, of the shards that are in it; blocks: of it (`core.parity`); of, rooms: the shards
    that are in a complete slot, and its bytes from one block to the next."""

    def __init__(self, homes: Mapping[int, int], blocks: int) -> None:
        self.homes, self.blocks = dict(homes), blocks
        self.of: list[tuple[Member, ...]] = [(), ()]
        self.rooms = [0, 0]
        self.fill: Fold | None = None

    def is_like(self, other: Parity) -> bool:
        """Whether it is of the same shards, in the same way."""
        return (self.homes, self.blocks) == (other.homes, other.blocks)
