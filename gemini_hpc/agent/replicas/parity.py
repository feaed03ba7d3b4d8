"""The parity beside a shard of this node: the shards that it covers, and one version on its way into a slot.

Each member of the stripe pushes the bytes of its shard that this parity covers. A thread for each member folds them
in as they arrive, in any order. Bytes folded in cannot be taken out again. If one member does not finish, the version
is void here (R5), as soon as no member writes any more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from gemini_hpc import clock
from gemini_hpc.agent.replicas import galois
from gemini_hpc.core.copy import Member
from gemini_hpc.core.slots import Stamp


class ParityFold:
    """A version of the parity that is being folded in."""

    def __init__(self, stamp: Stamp, index: int, view: memoryview, room: int, wanted: Mapping[int, int]) -> None:
        """Create an empty fold.

        Args:
            stamp: Stamp of the version.
            index: Index of the slot.
            view: The slot's memory.
            room: Bytes from one block to the next.
            wanted: Ranks whose bytes have not begun to arrive. Ranks whose bytes are arriving move to `writing`.
        """
        self.stamp, self.index, self.view, self.room = stamp, index, view, room
        self.wanted, self.writing = set(wanted), set[int]()
        self.folded: dict[int, Member] = {}
        self.torn = False  # a member has ended too early
        self.touched = clock.monotonic()  # time at which a member last began or ended, in seconds
        self._lock = threading.Lock()

    @property
    def whole(self) -> bool:
        """Return whether all members are folded in."""
        return not self.wanted and not self.writing and not self.torn

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the members that are folded in, sorted by rank."""
        return tuple(self.folded[rank] for rank in sorted(self.folded))

    def add(self, offset: int, data: memoryview, factor: int = 1) -> None:
        """Fold bytes in, multiplied by `factor`, from any thread.

        Raises:
            ValueError: The bytes reach beyond the slot's end.
        """
        if offset + len(data) > len(self.view):
            raise ValueError(f"bytes {offset} to {offset + len(data)} of a parity of {len(self.view)} bytes")
        with self._lock:
            galois.add(self.view[offset : offset + len(data)], data, factor)


class Parity:
    """The parity of other ranks' shards.

    Attributes:
        homes: Node rank of the home of each covered shard, by rank.
        blocks: Number of blocks (`core.parity`).
        members: The shards covered by each complete slot.
        rooms: Bytes from one block to the next in each complete slot.
        fill: The version in progress.
    """

    def __init__(self, homes: Mapping[int, int], blocks: int) -> None:
        self.homes, self.blocks = dict(homes), blocks
        self.members: list[tuple[Member, ...]] = [(), ()]
        self.rooms = [0, 0]
        self.fill: ParityFold | None = None


def cover_alike(one: Parity | None, other: Parity | None) -> bool:
    """Return whether both cover the same shards in the same way, or none is a parity."""
    return (one and (one.homes, one.blocks)) == (other and (other.homes, other.blocks))
