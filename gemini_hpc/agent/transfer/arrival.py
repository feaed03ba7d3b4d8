"""The bytes of a version on their way into a slot, over several connections at once.

Each byte arrives once. A piece (`core.digest`) whose bytes arrive in order over one connection is hashed as they
arrive, while they are in the processor's cache. Other pieces are hashed by the thread that brings their last byte.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Sequence

import xxhash

from gemini_hpc.agent.transfer.receipts import Receipts
from gemini_hpc.core import ranges
from gemini_hpc.core.digest import PIECE_BYTES, Pieces
from gemini_hpc.core.ranges import Range
from gemini_hpc.wire import peer
from gemini_hpc.wire.link import BlockingLink, LinkClosed

_MOST_GAPS = 4096  # a home sends in order, so that only the chunks under way leave gaps


class Arrival:
    """The record of which bytes are missing, and the digests of the pieces that are there. Any thread may use it."""

    def __init__(self, view: memoryview, used: int, present: Sequence[Range] = ()) -> None:
        """Create the record.

        Args:
            view: The slot.
            used: Number of bytes of the version.
            present: Ranges that are in the slot already.
        """
        self.pieces = Pieces(used)
        self._view = view
        self._lock = threading.Lock()
        self._open = list(ranges.list_gaps(present, used))  # bytes that no chunk has named yet, in order
        self._missing = ranges.count_bytes(self._open)
        self._lacks = array(
            "L", (end - start for _, start, end in self.pieces.enumerate_bounds(0, self.pieces.count))
        )
        for start, end in present:
            for number in range(start // PIECE_BYTES, -(-end // PIECE_BYTES)):
                first, last = max(start, number * PIECE_BYTES), min(end, (number + 1) * PIECE_BYTES)
                self._lacks[number] -= last - first

    @property
    def missing(self) -> int:
        """Return the number of bytes that have not arrived, or are not hashed."""
        return self._missing

    def list_present_runs(self) -> list[tuple[int, int]]:
        """Return the runs of pieces of which nothing is missing, as (first, after the last).

        The caller hashes these pieces. Call before bytes arrive.
        """
        return ranges.merge_ranges((number, number + 1) for number, lacks in enumerate(self._lacks) if not lacks)

    def claim(self, offset: int, length: int) -> memoryview:
        """Return the place of a chunk's bytes. No other chunk gets any of them.

        Raises:
            LinkClosed: Some of the bytes are not missing, or are on their way already.
        """
        with self._lock:
            at = bisect_right(self._open, offset, key=lambda gap: gap[0]) - 1
            start, end = self._open[at] if at >= 0 else (0, 0)
            if not start <= offset < offset + length <= end:
                raise LinkClosed(f"a chunk of {length} bytes at {offset} of {self.pieces.length}, not all missing")
            self._open[at : at + 1] = [gap for gap in ((start, offset), (offset + length, end)) if gap[0] < gap[1]]
            if len(self._open) > _MOST_GAPS:
                raise LinkClosed("too many gaps between the chunks")
            return self._view[offset : offset + length]

    def reopen_pieces(self, numbers: Sequence[int]) -> None:
        """Let these pieces come again, all bytes having arrived."""
        with self._lock:
            for number, start, end in (next(self.pieces.enumerate_bounds(n, n + 1)) for n in numbers):
                self._open.append((start, end))
                self._lacks[number] = end - start
                self._missing += end - start

    def mark_written(self) -> None:
        """Record that all bytes are there. The caller hashes all pieces."""
        with self._lock:
            self._open, self._missing = [], 0
            self._lacks = array("L", bytes(self._lacks.itemsize * len(self._lacks)))

    def record_landed(self, number: int, count: int, found: bytes | None) -> None:
        """Record that bytes of a piece have arrived.

        Args:
            number: Number of the piece.
            count: Number of bytes.
            found: Digest of the whole piece, if the caller has seen all of its bytes.
        """
        with self._lock:
            self._lacks[number] -= count
            is_whole = not self._lacks[number]
        if is_whole:
            if found is None:
                start, end = number * PIECE_BYTES, min(self.pieces.length, (number + 1) * PIECE_BYTES)
                with self._view[start:end] as piece:
                    found = xxhash.xxh3_128_digest(piece)
            self.pieces.put(number, found)
        with self._lock:
            self._missing -= count


class Connection:
    """A connection that brings bytes of a version, used by one thread."""

    def __init__(self, arrival: Arrival, link: BlockingLink, silence_s: float) -> None:
        self.arrival, self._link, self._silence_s = arrival, link, silence_s
        self._receipts = Receipts(link)
        self._hasher = xxhash.xxh3_128()
        self._offset = 0  # the next byte to come
        self._hashed = -1  # the end of the bytes in the hasher, which begin with a piece

    def wait(self) -> None:
        """Wait for the next message."""
        self._receipts.wait()

    def acknowledge(self) -> None:
        """Acknowledge what has arrived."""
        self._receipts.acknowledge()

    def receive(self, chunk: peer.PushChunk) -> None:
        """Receive the bytes behind a chunk's header.

        Raises:
            LinkClosed: The chunk is not wanted, or its bytes do not arrive.
        """
        with self.arrival.claim(chunk.offset, chunk.length) as part:
            self._offset = chunk.offset
            self._link.fill(part, self._silence_s, self._hash_next)
        self._receipts.add(chunk.length)

    def _hash_next(self, data: memoryview) -> None:
        """Hash the next bytes."""
        done = 0
        while done < len(data):
            number = self._offset // PIECE_BYTES
            count = min(len(data) - done, (number + 1) * PIECE_BYTES - self._offset)
            if self._offset % PIECE_BYTES == 0:
                self._hasher.reset()
                self._hashed = self._offset
            with data[done : done + count] as part:
                if self._hashed == self._offset:
                    self._hasher.update(part)
                    self._hashed += count
            self._offset, done = self._offset + count, done + count
            is_whole = self._hashed == self._offset == min(self.arrival.pieces.length, (number + 1) * PIECE_BYTES)
            self.arrival.record_landed(number, count, self._hasher.digest() if is_whole else None)
