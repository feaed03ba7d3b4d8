"""A shard's manifest: the tensors of a training rank, and the place in its slot of each of their boxes."""

from __future__ import annotations

import math

import msgspec

from gemini_hpc.format.dtypes import get_item_bytes
from gemini_hpc.format.slot_header import TENSOR_ALIGN_BYTES

FORMAT = 1
PARAMETER, LIFTED = -1, -2  # instead of an optimizer's index


class TensorRow(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the rank.

    Attributes:
        key: Name of the tensor.
        dtype: Element type by torch's name.
        shape: Global shape.
        shared: True if the same key on other ranks means the same (global) tensor. Otherwise the tensor is this
            rank's own.
        device: Device of the tensor.
        optimizer: Index of the optimizer whose state of parameter `owner` this is, named `name`; or PARAMETER; or
            LIFTED for a large tensor taken out of the small state, such as a buffer.
        owner: Parameter of an optimizer tensor.
        name: Name of the optimizer's state.
        like_owner: True for an optimizer tensor that is sharded as its parameter is.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    shared: bool
    device: str
    optimizer: int = PARAMETER
    owner: str = ""
    name: str = ""
    like_owner: bool = False


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A box of `rows[row]`.

    `offset` and `size` are global, by dimension. Its bytes start at `start` in the tensor area.
    """

    row: int
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int


class ShardManifest(msgspec.Struct, frozen=True):
    """The information needed to read a slot's tensor area. `aliases` are further names of tied parameters."""

    rank: int
    world: int
    rows: tuple[TensorRow, ...]
    pieces: tuple[Piece, ...]
    aliases: dict[str, str] = {}
    format: int = FORMAT

    def count_bytes(self, piece: Piece) -> int:
        """Return the number of bytes of a piece."""
        return math.prod(piece.size) * get_item_bytes(self.rows[piece.row].dtype)

    def count_tensor_bytes(self) -> int:
        """Return the number of bytes of the tensor area."""
        return max((p.start + self.count_bytes(p) for p in self.pieces), default=0)


_decoder = msgspec.msgpack.Decoder(ShardManifest)


def pack(manifest: ShardManifest) -> bytes:
    """Return the manifest as stored in a slot."""
    return msgspec.msgpack.encode(manifest)


def unpack(data: bytes | memoryview, tensor_bytes: int) -> ShardManifest:
    """Return the manifest from bytes: the inverse of `pack`.

    Raises:
        ValueError: The bytes are no manifest of this format. Or a piece is no box of its tensor, or lies outside the
            tensor area.
    """
    try:
        manifest = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"manifest: {error}") from None
    if manifest.format != FORMAT:
        raise ValueError(f"manifest: format {manifest.format} found, {FORMAT} wanted")
    for row in manifest.rows:
        get_item_bytes(row.dtype)
    for piece in manifest.pieces:
        if not 0 <= piece.row < len(manifest.rows):
            raise ValueError(f"manifest: a piece names row {piece.row} of {len(manifest.rows)}")
        row = manifest.rows[piece.row]
        boxed = len(piece.offset) == len(piece.size) == len(row.shape) and all(
            min(o, s) >= 0 and o + s <= n for o, s, n in zip(piece.offset, piece.size, row.shape, strict=True)
        )
        if not boxed:
            raise ValueError(f"manifest: {piece.offset}+{piece.size} is no box of {row.key} {row.shape}")
        if piece.start % TENSOR_ALIGN_BYTES or not 0 <= piece.start <= tensor_bytes - manifest.count_bytes(piece):
            raise ValueError(f"manifest: a piece of {row.key} lies outside the tensor area")
    return manifest


def place_boxes(
    rows: tuple[TensorRow, ...], boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
) -> tuple[Piece, ...]:
    """Give each box (row, offset, size) its aligned place, in the order given. Empty boxes are left out."""
    pieces = []
    at = 0
    for row, offset, size in boxes:
        length = math.prod(size) * get_item_bytes(rows[row].dtype)
        if not length:
            continue
        pieces.append(Piece(row, offset, size, at))
        at += -(-length // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES
    return tuple(pieces)
