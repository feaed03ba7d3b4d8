"""A reader of the buffers in an encoded small state, for places without torch.

The encoding is that of `gemini_hpc.train.state.encode`. Everything before the buffers is skipped.
"""

from __future__ import annotations

import math
import struct

from gemini_hpc.format.dtypes import get_item_bytes
from gemini_hpc.format.shard_manifest import TensorRow

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
    reader = _Reader(small)
    for _ in range(reader.read_mapping() if small else 0):
        if reader.read_text() == "buffers":
            return [found for _ in range(reader.read_mapping()) if (found := reader.read_buffer()) is not None]
        reader.skip()
    return []


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = memoryview(data), 0

    def _read_bytes(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise ValueError(f"a small state ends early: {count} bytes wanted, {len(self._data) - self._at} left")
        self._at += count
        return self._data[self._at - count : self._at]

    def _read_count(self) -> int:
        return int(_COUNT.unpack(self._read_bytes(4))[0])

    def _read_sized(self) -> memoryview:
        return self._read_bytes(int(_SIZE.unpack(self._read_bytes(8))[0]))

    def _read_tag(self, known: bytes | frozenset[int]) -> int:
        tag = self._read_bytes(1)[0]
        if tag not in known:
            raise ValueError(f"a small state has tag {tag} where another one is wanted")
        return tag

    def _read_array(self) -> tuple[str, tuple[int, ...], memoryview]:
        name = bytes(self._read_bytes(self._read_count())).decode()
        shape = tuple(int(size) for (size,) in _SIZE.iter_unpack(self._read_bytes(8 * self._read_count())))
        return name, shape, self._read_sized()

    def read_mapping(self) -> int:
        """Read the head of a mapping, and return how many keys and values follow."""
        self._read_tag(b"d")
        return self._read_count()

    def read_text(self) -> str:
        self._read_tag(b"s")
        return bytes(self._read_sized()).decode()

    def read_buffer(self) -> tuple[TensorRow, memoryview] | None:
        """Read a buffer, and return it with its bytes; None if the buffer lies elsewhere in the slot."""
        name = self.read_text()
        if bytes(self._data[self._at : self._at + 1]) == b"L":
            self.skip()
            return None
        self._read_tag(_TENSORS)
        self._read_tag(b"X")
        kind, shape, data = self._read_array()
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
                self._read_bytes(_FIXED[tag])
            elif tag in _SIZED:
                self._read_sized()
            elif tag in _ITEMS:
                values += self._read_count() * _ITEMS[tag]
            elif tag in _ARRAYS:
                self._read_array()
            else:
                values += 1
