"""A version of another rank's shard, in progress by a training rank here (see `replica_fills`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gemini_hpc.core.ranges import Range
from gemini_hpc.core.slots import Slot, Stamp
from gemini_hpc.wire.local_server import LocalClient


@dataclass(eq=False)
class Fill:
    """A version that a rank here fills, from the permission to write to the slot.

    Attributes:
        client: Connection of the filling rank.
        version: Version being filled.
        stamp: Its stamp.
        index: Index of the slot.
        before: The slot's previous contents.
        present: Byte ranges filled, once `over` is set.
        over: Set when the rank has stopped writing.
        is_last: The rank has gone, and fills no later version.
    """

    client: LocalClient
    version: int
    stamp: Stamp
    index: int
    before: Slot
    present: tuple[Range, ...] = ()
    over: asyncio.Event = field(default_factory=asyncio.Event)
    is_last: bool = False
