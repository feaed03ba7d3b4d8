"""The parts of another rank's shard that this rank has in its own tensors, and their places in a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from gemini_hpc.format import shard_manifest
from gemini_hpc.format.slot_header import HEADER_BYTES, SlotLayout, parse_header
from gemini_hpc.train.state.ownership import Own
from gemini_hpc.train.state.tensors import select_box

GAP_BYTES = 63  # largest padding between two tensors


class Piece(NamedTuple):
    """A box of a tensor that is on this rank, and its place in a slot.

    Attributes:
        key: The tensor.
        offset: Offset of the box in this rank's part of the tensor.
        size: Size of the box.
        start: First byte in the slot.
        end: Byte behind the last one in the slot.
    """

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    end: int


def read_directory(memory: torch.Tensor) -> tuple[SlotLayout, shard_manifest.ShardManifest]:
    """Read the layout and the manifest of a slot.

    Args:
        memory: All bytes of the slot (uint8).

    Raises:
        ValueError: The header or the manifest is invalid.
    """
    layout = parse_header(memory[:HEADER_BYTES].numpy().tobytes(), memory.numel()).layout
    raw = memory[layout.manifest_offset : layout.manifest_offset + layout.manifest_bytes].numpy().tobytes()
    return layout, shard_manifest.unpack(raw, layout.tensor_bytes)


def find_pieces(manifest: shard_manifest.ShardManifest, layout: SlotLayout, own: Mapping[str, Own]) -> list[Piece]:
    """Return the manifest's pieces that this rank has.

    Args:
        manifest: The shard's manifest.
        layout: The slot's layout.
        own: The tensors that this rank shares with others, by key.
    """
    found = (_match_piece(manifest, piece, layout, own) for piece in manifest.pieces)
    return [piece for piece in found if piece is not None]


def _match_piece(
    manifest: shard_manifest.ShardManifest, piece: shard_manifest.Piece, layout: SlotLayout, own: Mapping[str, Own]
) -> Piece | None:
    row = manifest.rows[piece.row]
    own_tensor = own.get(row.key)
    if own_tensor is None or not row.shared or (row.shape, row.dtype) != (own_tensor.entry.shape, own_tensor.dtype):
        return None
    offset = tuple(a - b for a, b in zip(piece.offset, own_tensor.entry.offset, strict=True))
    inside = all(
        a >= 0 and a + n <= most for a, n, most in zip(offset, piece.size, own_tensor.entry.size, strict=True)
    )
    at = layout.tensor_offset + piece.start
    return Piece(row.key, offset, piece.size, at, at + manifest.count_bytes(piece)) if inside else None


def prepare_pairs(
    wanted: Sequence[Piece], own: Mapping[str, Own], tensors: Mapping[str, torch.Tensor], memory: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the (target, source) tensors of every piece.

    Gaps between neighbouring pieces are set to zeros, as at the shard's home.

    Args:
        wanted: The pieces.
        own: The tensors that this rank shares with others, by key.
        tensors: This rank's parts of the tensors, by key.
        memory: All bytes of the slot (uint8).

    Raises:
        KeyError: The state no longer matches the pieces.
        ValueError: The state no longer matches the pieces.
        RuntimeError: The state no longer matches the pieces.
    """
    for (_, end), (start, _) in pairwise(sorted((piece.start, piece.end) for piece in wanted)):
        if 0 < start - end <= GAP_BYTES:
            memory[end:start].zero_()
    found = []
    for piece in wanted:
        tensor = tensors[piece.key].detach()
        if tuple(tensor.shape) != own[piece.key].entry.size:
            raise ValueError(f"{piece.key} has a different shape")
        view = select_box(tensor, piece.offset, piece.size)
        found.append((memory[piece.start : piece.end].view(view.dtype).view(piece.size), view))
    return found
