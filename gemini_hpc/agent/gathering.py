"""A version on its way to the tier, where its files are counted: at the root, or at the leader of a scavenge."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from gemini_hpc import clock
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.stored import NodeFile


@dataclass
class Gathering:
    """done: when it is there, "", or why it will not be."""

    stamp: Stamp
    world: int
    attempt: int = field(default_factory=lambda: int.from_bytes(os.urandom(4)))
    began: float = field(default_factory=clock.monotonic)
    files: dict[str, NodeFile] = field(default_factory=dict)
    done: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def take(self, files: Iterable[NodeFile]) -> None:
        """These are on the tier."""
        self.files.update({file.name: file for file in files})

    @property
    def whole(self) -> bool:
        """Whether each rank's shard is."""
        return not self.missing

    @property
    def missing(self) -> list[int]:
        """Ranks whose shards are not."""
        return sorted(set(range(self.world)) - {s.rank for file in self.files.values() for s in file.shards})

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files.values())

    def end(self, reason: str = "") -> None:
        """Tell those who wait."""
        if not self.done.done():
            self.done.set_result(reason)
