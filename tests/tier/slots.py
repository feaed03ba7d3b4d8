"""Complete slots, as a training leaves them in memory."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.dtypes import get_item_bytes
from gemini_hpc.format.shard_manifest import ShardManifest, TensorRow
from gemini_hpc.format.slot_header import SlotLayout, pack_header
from gemini_hpc.tier.shards import ParsedSlot

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class Slot:
    """memory: all of it; used: bytes that count; values: by row's key and offset, the bytes of each piece."""

    memory: mmap.mmap
    used: int
    values: dict[tuple[str, tuple[int, ...]], bytes]
    manifest: ShardManifest

    @property
    def view(self) -> memoryview:
        return memoryview(self.memory)

    def shard(self) -> ParsedSlot:
        return ParsedSlot.parse(self.view, len(self.memory))

    def digest(self) -> str:
        return digest_bytes(self.view[: self.used])


def make(
    rank: int,
    world: int,
    rows: tuple[TensorRow, ...],
    boxes: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]],
    *,
    stamp: tuple[int, int] = (3, 12),
    small: bytes = b"small state",
    aliases: dict[str, str] | None = None,
    seed: int = 0,
    fd: int = -1,
) -> Slot:
    """A slot with random tensors in these boxes (row, offset, size), and garbage between them."""
    dice = np.random.default_rng([seed, rank])
    pieces = shard_manifest.place_boxes(rows, list(boxes))
    manifest = ShardManifest(rank, world, rows, pieces, aliases or {})
    packed = shard_manifest.pack(manifest)
    layout = SlotLayout.plan(len(packed), manifest.count_tensor_bytes(), max(8192, len(small)))
    if fd >= 0:
        os.ftruncate(fd, layout.total)
    memory = mmap.mmap(fd, layout.total)
    used = layout.small_offset + len(small)
    memory[:used] = dice.bytes(used)
    memory[:4096] = pack_header(layout, len(small), Stamp(*stamp), rank, world)
    memory[layout.manifest_offset : layout.manifest_offset + len(packed)] = packed
    memory[layout.small_offset : used] = small
    values = {}
    for piece in pieces:
        row = rows[piece.row]
        size = math.prod(piece.size) * get_item_bytes(row.dtype)
        data = bytes(size) if row.dtype == "bool" else dice.bytes(size)
        if row.dtype in ("float32", "float64", "bfloat16"):  # numbers, that equal themselves
            data = (dice.integers(0, 64, size, dtype=np.uint8)).tobytes()
        at = layout.tensor_offset + piece.start
        memory[at : at + size] = data
        values[row.key, piece.offset] = data
    return Slot(memory, used, values, manifest)
