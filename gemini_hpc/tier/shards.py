"""A slot's bytes as the tier sees them: areas, tensors, and a digest independent of the bytes in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import Piece, ShardManifest
from gemini_hpc.format.slot_header import HEADER_BYTES, Header, parse_header


@dataclass(frozen=True)
class Area:
    """The bytes `begin` to `end` of a slot.

    `piece` is the tensor piece stored there; None means an area of the slot itself.
    """

    begin: int
    end: int
    piece: Piece | None = None


@dataclass(frozen=True)
class ParsedSlot:
    """A complete, parsed slot of one rank; `view` is its memory and covers at least all used bytes."""

    view: memoryview
    header: Header
    manifest: ShardManifest

    @classmethod
    def parse(cls, view: memoryview, total_bytes: int) -> ParsedSlot:
        """Parse a slot of `total_bytes`. Raises ValueError on any inconsistency."""
        header = parse_header(view[:HEADER_BYTES], total_bytes)
        layout = header.layout
        if len(view) < header.used_bytes:
            raise ValueError(f"a copy of {len(view)} bytes, {header.used_bytes} wanted")
        packed = view[layout.manifest_offset : layout.manifest_offset + layout.manifest_bytes]
        manifest = shard_manifest.unpack(packed, layout.tensor_bytes)
        if (manifest.rank, manifest.world) != (header.rank, header.world):
            raise ValueError(f"a header of rank {header.rank}, a directory of rank {manifest.rank}")
        return cls(view, header, manifest)

    def list_areas(self) -> Iterator[Area]:
        """Yield all areas in order, tensors as they lie in memory. Raises ValueError if two tensors overlap."""
        layout = self.header.layout
        yield Area(0, HEADER_BYTES)
        yield Area(layout.manifest_offset, layout.manifest_offset + layout.manifest_bytes)
        at = 0
        for piece in sorted(self.manifest.pieces, key=lambda p: p.start):
            if piece.start < at:
                raise ValueError(f"a piece of {self.manifest.rows[piece.row].key} overlaps the one before it")
            at = piece.start + self.manifest.count_bytes(piece)
            yield Area(layout.tensor_offset + piece.start, layout.tensor_offset + at, piece)
        yield Area(layout.small_offset, self.header.used_bytes)

    def clear_gaps(self) -> None:
        """Zero the bytes between the areas, which hold leftovers or nothing."""
        at = 0
        for area in self.list_areas():
            if area.begin > at:
                self.view[at : area.begin] = bytes(area.begin - at)
            at = area.end
