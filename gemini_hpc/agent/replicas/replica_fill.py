"""One version of another rank's shard, as far as a training rank here fills it (see `replica_fills`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gemini_hpc.core.ranges import Range
from gemini_hpc.core.slots import Slot, Stamp
from gemini_hpc.wire.local_server import Client


@dataclass(eq=False)
class Fill:
    """One version, from the word that the slot may be written to. before: what the slot had; there: what has been
    filled, when it is over."""

    client: Client
    version: int
    stamp: Stamp
    index: int
    before: Slot
    there: tuple[Range, ...] = ()
    over: asyncio.Event = field(default_factory=asyncio.Event)
