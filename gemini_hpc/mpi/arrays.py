"""The arrays of one rank: their layout in a slot, and copies to and from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemini_hpc.format import shard_manifest
from gemini_hpc.format.dtypes import ITEM_BYTES
from gemini_hpc.format.shard_manifest import Piece, ShardManifest, TensorRow
from gemini_hpc.format.slot_header import HEADER_BYTES, SlotLayout, parse_header

Array = NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """An array that is one rank's box of a global array.

    Boxes of different ranks may overlap if they hold the same values.

    Attributes:
        array: The box.
        offset: Begin of the box in the global array.
        shape: Shape of the global array.
    """

    array: Any
    offset: Sequence[int]
    shape: Sequence[int]


@dataclass
class _Held:
    array: Array
    offset: Shape
    row: TensorRow


class Arrays:
    """The named arrays that one rank passed."""

    def __init__(self, given: Mapping[str, Any], rank: int, world: int) -> None:
        """Check the arrays and plan their layout.

        Raises:
            TypeError: A value cannot be captured.
            ValueError: A value cannot be captured, or there are none.
        """
        if not given:
            raise ValueError("no arrays were given: there is nothing to protect")
        self._held: dict[str, _Held] = {}
        for name, value in given.items():
            if not name or not isinstance(name, str):
                raise TypeError(f"{name!r}: array names must be strings")
            part = value if isinstance(value, Part) else None
            array = _as_writable(name, part.array if part else value)
            shape = tuple(int(n) for n in part.shape) if part else array.shape
            offset = tuple(int(n) for n in part.offset) if part else (0,) * array.ndim
            dtype = _find_dtype_name(array.dtype)
            if dtype is None:
                if part:
                    raise TypeError(f"{name}: parts of {array.dtype} arrays cannot be put together")
                shape, offset, dtype = (array.nbytes,), (0,), "uint8"
            self._held[name] = _Held(array, offset, TensorRow(name, dtype, shape, part is not None, "cpu"))
        rows = tuple(held.row for held in self._held.values())
        boxes = [(i, h.offset, _find_shape(h)) for i, h in enumerate(self._held.values())]
        self.manifest = ShardManifest(rank, world, rows, shard_manifest.place_boxes(rows, boxes))
        self.packed = shard_manifest.pack(self.manifest)
        # this rejects a part that is no box of its array
        shard_manifest.unpack(self.packed, self.manifest.count_tensor_bytes())
        self.layout = SlotLayout.plan(len(self.packed), self.manifest.count_tensor_bytes(), 0)

    def rebind(self, name: str, value: Any) -> None:
        """Replace an array by another one.

        Raises:
            KeyError: The name is unknown.
            ValueError: The new array has another shape or type.
        """
        held = self._held[name]
        array = _as_writable(name, value)
        if (array.shape, array.dtype) != (held.array.shape, held.array.dtype):
            raise ValueError(
                f"{name} was {held.array.shape} {held.array.dtype}, the new one is {array.shape} {array.dtype}"
            )
        held.array = array

    def store(self, area: memoryview) -> None:
        """Copy all arrays into a slot's tensor area."""
        for piece, held in self._list_held_pieces():
            size = self.manifest.count_bytes(piece)
            target = np.frombuffer(area[piece.start : piece.start + size], dtype=held.array.dtype)
            np.copyto(target.reshape(held.array.shape), held.array)

    def list_pieces(self) -> list[tuple[Piece, Array]]:
        """Return each box with its values, contiguous in memory, as bytes if they are stored as bytes."""
        found = []
        for piece, held in self._list_held_pieces():
            values = np.asarray(held.array, order="C")
            plain = _find_dtype_name(values.dtype) is not None
            found.append((piece, values if plain else values.reshape(-1).view("uint8")))
        return found

    def _list_held_pieces(self) -> list[tuple[Piece, _Held]]:
        held = list(self._held.values())
        return [(piece, held[piece.row]) for piece in self.manifest.pieces]

    def load(self, shards: Sequence[Saved], same: bool) -> None:
        """Fill all arrays from the shards of a version.

        Args:
            shards: Shards, this rank's own first.
            same: The version was saved by as many ranks.

        Raises:
            ValueError: The shards do not fit; no array has been changed.
        """
        found = {name: self._find_sources(held, shards, same) for name, held in self._held.items()}
        for name, sources in found.items():
            array = self._held[name].array
            for into, values in sources:
                array[into] = values

    def _find_sources(self, held: _Held, shards: Sequence[Saved], same: bool) -> list[tuple[Any, Array]]:
        """Return (place in the array, values) for all sources that fill an array."""
        row, have, sources = held.row, np.zeros(_find_shape(held), dtype=bool), []
        for saved in shards if row.shared else shards[: 1 if same else 0]:
            for piece in saved.manifest.pieces:
                saved_row = saved.manifest.rows[piece.row]
                if saved_row.key != row.key:
                    continue
                if (saved_row.shape, saved_row.dtype, saved_row.shared) != (row.shape, row.dtype, row.shared):
                    raise ValueError(
                        f"{row.key} is {row.shape} {row.dtype}, was saved as {saved_row.shape} {saved_row.dtype}"
                    )
                both = _intersect_boxes(held.offset, have.shape, piece.offset, piece.size)
                if both is None or have[_build_slices(both, held.offset)].all():
                    continue
                values = saved.view_piece(
                    piece, held.array.dtype if saved_row.dtype != "uint8" else np.dtype("uint8")
                )
                place = _build_slices(both, held.offset)
                have[place] = True
                sources.append((place, values[_build_slices(both, piece.offset)]))
        if not have.all():
            where = (
                "" if same or row.shared else " (the array is not a Part: only as many ranks as saved it can load it)"
            )
            raise ValueError(f"{row.key} is not in the saved state{where}")
        if _find_dtype_name(held.array.dtype) is None:
            flat = np.concatenate([values.ravel() for _, values in sources]) if sources else np.empty(0, "uint8")
            return [((...,), flat.view(held.array.dtype).reshape(held.array.shape))]
        return sources


@dataclass(frozen=True)
class Saved:
    """A shard of a version, in memory."""

    manifest: ShardManifest
    area: memoryview

    @classmethod
    def read(cls, memory: memoryview, total_bytes: int) -> Saved:
        """Parse the used bytes of a slot of `total_bytes`.

        Raises:
            ValueError: The bytes are no valid shard.
        """
        header = parse_header(memory[:HEADER_BYTES], total_bytes)
        layout = header.layout
        end = layout.manifest_offset + layout.manifest_bytes
        manifest = shard_manifest.unpack(memory[layout.manifest_offset : end], layout.tensor_bytes)
        if manifest.rank != header.rank or len(memory) < header.used_bytes:
            raise ValueError("a copy does not match its header")
        return cls(manifest, memory[layout.tensor_offset : layout.tensor_offset + layout.tensor_bytes])

    def view_piece(self, piece: Piece, dtype: np.dtype[Any]) -> Array:
        """Return a piece as an array over the shard's memory."""
        data = self.area[piece.start : piece.start + self.manifest.count_bytes(piece)]
        return np.frombuffer(data, dtype=dtype).reshape(piece.size)


def _as_writable(name: str, value: Any) -> Array:
    """Return an array over the memory of an object with a writable buffer."""
    if isinstance(value, np.ndarray):
        array = value
    else:
        try:
            array = np.asarray(memoryview(value))
        except TypeError:
            raise TypeError(f"{name} is a {type(value).__name__}, which has no buffer: pass an array") from None
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only: gemini-hpc could not restore it")
    if array.dtype.hasobject:
        raise TypeError(f"{name} holds Python objects, not numbers")
    return array


def _find_dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return the manifest's (torch's) name of a NumPy type, or None for types stored as bytes."""
    return dtype.name if dtype.isnative and dtype.name in ITEM_BYTES else None


def _find_shape(held: _Held) -> Shape:
    return held.array.shape if _find_dtype_name(held.array.dtype) is not None else held.row.shape


def _intersect_boxes(a: Shape, a_size: Shape, b: Shape, b_size: Shape) -> tuple[tuple[int, int], ...] | None:
    """Return begin and end of two boxes' intersection in each dimension, or None if it is empty."""
    both = tuple((max(x, y), min(x + n, y + k)) for x, n, y, k in zip(a, a_size, b, b_size, strict=True))
    return None if any(begin >= end for begin, end in both) else both


def _build_slices(both: tuple[tuple[int, int], ...], origin: Shape) -> Any:
    return tuple(slice(begin - at, end - at) for (begin, end), at in zip(both, origin, strict=True)) or ...
