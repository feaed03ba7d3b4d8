"""A reader of the buffers in an encoded small state, for places without torch.

The encoding is that of `gemini_hpc.train.state.encode`. Everything before the buffers is skipped.
"""

from __future__ import annotations

import math
import struct

from gemini_hpc.format.dtypes import get_item_bytes
from gemini_hpc.format.shard_manifest import TensorRow

MAX_DIMS = 64
_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")
_FIXED = {ord("N"): 0, ord("T"): 0, ord("F"): 0, ord("f"): 8, ord("j"): 16, ord("e"): 24}  # tag: bytes that follow
_SIZED = b"isbBIDvwyG"  # their length, then so many bytes
_ITEMS = {**dict.fromkeys(b"ltzrqSZPL", 1), **dict.fromkeys(b"dOCn", 2)}  # a count, then so many values for each
_ARRAYS = b"aAX"  # name of the type, shape, bytes
_AROUND = b"cgE"  # one more value follows
_TENSORS = b"cg"
TAGS = frozenset((*_FIXED, *_SIZED, *_ITEMS, *_ARRAYS, *_AROUND))


def list_buffers(small: bytes) -> list[tuple[TensorRow, memoryview]]:
    """Return the buffers in a rank's small state, each with its bytes. An MPI program's small state is empty.

    Raises:
        ValueError: The bytes are no small state.
    """
    reader = _SmallStateReader(memoryview(small))
    for _ in range(reader.read_mapping() if small else 0):
        if reader.read_text() == "buffers":
            return [found for _ in range(reader.read_mapping()) if (found := reader.read_buffer()) is not None]
        reader.skip()
    return []


class EncodedReader:
    """A reader of the words and payloads that encoded state consists of."""

    def __init__(self, data: memoryview) -> None:
        self.data = data.cast("B") if data.format != "B" or data.ndim != 1 else data
        self.at = 0

    def read_bytes(self, count: int) -> memoryview:
        """Read so many bytes.

        Raises:
            ValueError: So many bytes are not left.
        """
        if count > len(self.data) - self.at:
            raise ValueError(f"encoded state ends early: {count} bytes wanted, {len(self.data) - self.at} left")
        self.at += count
        return self.data[self.at - count : self.at]

    def read_count(self) -> int:
        """Read a number of items, each of which has at least one byte."""
        value = int(_COUNT.unpack(self.read_bytes(4))[0])
        if value > len(self.data) - self.at:
            raise ValueError(f"encoded state ends early: {value} items, with {len(self.data) - self.at} bytes left")
        return value

    def read_sized(self) -> memoryview:
        """Read bytes with their number before them."""
        return self.read_bytes(int(_SIZE.unpack(self.read_bytes(8))[0]))

    def read_array(self) -> tuple[str, tuple[int, ...], memoryview]:
        """Read the type's name, the shape and the bytes of an array."""
        name = bytes(self.read_bytes(self.read_count())).decode()
        ndim = self.read_count()
        if ndim > MAX_DIMS:
            raise ValueError(f"encoded state has an array of {ndim} dimensions")
        shape = tuple(int(size) for (size,) in _SIZE.iter_unpack(self.read_bytes(8 * ndim)))
        return name, shape, self.read_sized()


class _SmallStateReader(EncodedReader):
    def _read_tag(self, known: bytes | frozenset[int]) -> int:
        tag = self.read_bytes(1)[0]
        if tag not in known:
            raise ValueError(f"encoded state has tag {tag} where another one is wanted")
        return tag

    def read_mapping(self) -> int:
        """Read the head of a mapping, and return how many keys and values follow."""
        self._read_tag(b"d")
        return self.read_count()

    def read_text(self) -> str:
        self._read_tag(b"s")
        return bytes(self.read_sized()).decode()

    def read_buffer(self) -> tuple[TensorRow, memoryview] | None:
        """Read a buffer, and return it with its bytes; None if the buffer lies elsewhere in the slot."""
        name = self.read_text()
        if bytes(self.data[self.at : self.at + 1]) == b"L":
            self.skip()
            return None
        self._read_tag(_TENSORS)
        self._read_tag(b"X")
        kind, shape, data = self.read_array()
        row = TensorRow(name, kind.removeprefix("torch."), shape, True, "cpu")
        if math.prod(shape) * get_item_bytes(row.dtype) != len(data):
            raise ValueError(f"buffer {name} of {shape} {row.dtype} has {len(data)} bytes")
        return row, data

    def skip(self) -> None:
        """Skip a value with everything in it."""
        values = 1
        while values:
            values -= 1
            tag = self._read_tag(TAGS)
            if tag in _FIXED:
                self.read_bytes(_FIXED[tag])
            elif tag in _SIZED:
                self.read_sized()
            elif tag in _ITEMS:
                values += self.read_count() * _ITEMS[tag]
            elif tag in _ARRAYS:
                self.read_array()
            else:
                values += 1
