"""A version on its way to the tier, where its files are counted: at the root, or at the leader of a salvage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.stored import NodeFile


@dataclass
class SaveProgress:
    """attempt: of several saves of a version, which; began: when (monotonic)."""

    stamp: Stamp
    world: int
    attempt: int
    began: float
    files: dict[str, NodeFile] = field(default_factory=dict)

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
