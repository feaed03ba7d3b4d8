"""The digest of a slot's used bytes, computed in pieces: any thread can hash any piece, in any order.

Each piece of `PIECE_BYTES` has its own xxh3_128 of 16 bytes. The digest is the xxh3_128 over these in order,
followed by the number of bytes as 8 more bytes (little-endian). The digest has 32 hex digits. It detects accidents,
not attacks.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

PIECE_BYTES = 1 << 20
PIECE_DIGEST_BYTES = 16
_DIGITS = 32


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of these bytes. The GIL is released meanwhile."""
    stream = Digest()
    stream.update(data)
    return stream.to_hex()


def is_digest(text: str) -> bool:
    """Return whether this text is a digest."""
    return len(text) == _DIGITS and not text.strip("0123456789abcdef")


class Digest:
    """The digest of bytes that arrive one after the other, in steps of any length."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._piece = xxhash.xxh3_128()
        self._length = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes. The GIL is released meanwhile."""
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                end = min(len(view), at + PIECE_BYTES - self._length % PIECE_BYTES)
                with view[at:end] as part:
                    self._piece.update(part)
                self._length += end - at
                at = end
                if self._length % PIECE_BYTES == 0:
                    self._done += self._piece.digest()
                    self._piece.reset()

    def to_hex(self) -> str:
        """Return the digest of the bytes added so far."""
        return combine_pieces(self.pieces, self._length)

    @property
    def pieces(self) -> bytes:
        """Return the digests of the pieces so far, one after the other. The last piece may be incomplete."""
        return bytes(self._done + (self._piece.digest() if self._length % PIECE_BYTES else b""))

    def copy(self) -> Digest:
        """Return an independent digest that continues from the same bytes."""
        other = Digest()
        other._done, other._piece, other._length = bytearray(self._done), self._piece.copy(), self._length
        return other


class Pieces:
    """The digests of the pieces of `length` bytes, each recorded when it is known, from any thread."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.count = -(-length // PIECE_BYTES)
        self._found = bytearray(PIECE_DIGEST_BYTES * self.count)

    def enumerate_bounds(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield number, first byte and end of the pieces from `first` to before `end`."""
        for number in range(first, min(end, self.count)):
            yield number, number * PIECE_BYTES, min(self.length, (number + 1) * PIECE_BYTES)

    def put(self, number: int, found: bytes) -> None:
        """Record the digest of one piece, of 16 bytes."""
        self._found[number * PIECE_DIGEST_BYTES : (number + 1) * PIECE_DIGEST_BYTES] = found

    @property
    def found(self) -> bytes:
        """Return the digests of all pieces, one after the other. Each piece must have been recorded."""
        return bytes(self._found)

    def find_differing(self, other: bytes) -> list[int]:
        """Return the numbers of the pieces whose digests differ from another list of as many."""
        offsets = range(0, len(self._found), PIECE_DIGEST_BYTES)
        return [
            at // PIECE_DIGEST_BYTES
            for at in offsets
            if self._found[at : at + PIECE_DIGEST_BYTES] != other[at : at + PIECE_DIGEST_BYTES]
        ]

    def compute_digest(self) -> str:
        """Return the digest of all bytes. Each piece must have been recorded."""
        return combine_pieces(self._found, self.length)


def combine_pieces(pieces: bytes | bytearray, length: int) -> str:
    """Return the digest of `length` bytes whose pieces have these digests."""
    return xxhash.xxh3_128_hexdigest(bytes(pieces) + length.to_bytes(8, "little"))
