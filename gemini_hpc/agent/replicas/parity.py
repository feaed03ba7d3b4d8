"""The parity beside a shard of this node: which shards are in it, and one version on its way into a slot.

Each member of the stripe pushes the bytes that this parity has of its shard; they are folded in as they come, in any
order, by a thread for each member. What has been folded in halfway cannot be taken out again: where one of them does
not come to its end, the version is void here (R5), as soon as nobody writes any more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.core.copy import Member
from gemini_hpc.core.slots import Stamp

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Fold:
    """One version. index: of its slot; wanted: ranks of which nothing has come; writing: those that are coming."""

    def __init__(self, stamp: Stamp, index: int, view: memoryview, wanted: Mapping[int, int]) -> None:
        self.stamp, self.index, self.view = stamp, index, view
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

    def add(self, at: int, data: memoryview) -> None:
        """Fold bytes in, from any thread. Raises ValueError for bytes beyond the slot's end."""
        if at + len(data) > len(self.view):
            raise ValueError(f"bytes {at} to {at + len(data)} of a parity of {len(self.view)} bytes")
        with self._lock:
            fold(self.view[at : at + len(data)], data)


class Parity:
    """homes: node rank by rank, of the shards that are in it; of: those of a complete slot."""

    def __init__(self, homes: Mapping[int, int]) -> None:
        self.homes = dict(homes)
        self.of: list[tuple[Member, ...]] = [(), ()]
        self.fill: Fold | None = None


def fold(into: memoryview, data: memoryview) -> None:
    """into ^= data, of the same length; the GIL is free meanwhile."""
    import numpy as np

    bytes_here: NDArray[np.uint8] = np.frombuffer(into, np.uint8)
    np.bitwise_xor(bytes_here, np.frombuffer(data, np.uint8), out=bytes_here)
