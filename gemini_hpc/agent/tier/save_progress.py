"""A version on its way to the tier, with its files counted at the root or at the leader of a salvage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.stored import NodeFile


@dataclass
class SaveProgress:
    """The progress of one save of a version.

    Attributes:
        stamp: The version.
        world: Number of shards of the training.
        attempt: Number that distinguishes several saves of a version.
        began: Start time (monotonic), in seconds.
        files: Finished files, by name.
    """

    stamp: Stamp
    world: int
    attempt: int
    began: float
    files: dict[str, NodeFile] = field(default_factory=dict)

    def record_files(self, files: Iterable[NodeFile]) -> None:
        """Record that these files are on the tier."""
        self.files.update({file.name: file for file in files})

    @property
    def whole(self) -> bool:
        """Return whether every rank's shard is on the tier."""
        return not self.missing

    @property
    def missing(self) -> list[int]:
        """Return the ranks whose shards are not on the tier."""
        return sorted(set(range(self.world)) - {s.rank for file in self.files.values() for s in file.shards})

    @property
    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.bytes for file in self.files.values())
