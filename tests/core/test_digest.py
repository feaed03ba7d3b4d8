"""The digest of a slot's bytes: the same however they come."""

from __future__ import annotations

import random
from itertools import pairwise

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_hpc.core.digest import PIECE_BYTES, Digest, Pieces, digest_bytes, is_digest

LENGTHS = st.sampled_from(
    [0, 1, 17, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 7]
)
_BYTES = random.Random(7).randbytes(3 * PIECE_BYTES + 7)


def by_its_definition(data: bytes) -> str:
    pieces = [xxhash.xxh3_128_digest(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES)]
    return xxhash.xxh3_128_hexdigest(b"".join(pieces) + len(data).to_bytes(8, "little"))


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.lists(st.integers(0, 3 * PIECE_BYTES + 7), max_size=6), st.randoms(use_true_random=False))
def test_steps_and_orders_do_not_matter(length: int, cuts: list[int], order: random.Random) -> None:
    data = _BYTES[:length]
    wanted = by_its_definition(data)
    assert digest_bytes(data) == digest_bytes(memoryview(data)) == wanted and is_digest(wanted)

    stream = Digest()
    bounds = [0, *sorted(min(cut, length) for cut in cuts), length]
    for start, end in pairwise(bounds):
        branch = stream.copy()
        branch.update(b"something else")
        stream.update(memoryview(data)[start:end])
        assert stream.to_hex() == by_its_definition(data[:end])
    assert stream.to_hex() == wanted

    pieces = Pieces(length)
    shuffled = list(pieces.enumerate_bounds(0, pieces.count))
    order.shuffle(shuffled)
    for number, start, end in shuffled:
        pieces.put(number, xxhash.xxh3_128_digest(data[start:end]))
    assert pieces.compute_digest() == wanted


def test_a_byte_or_the_length_alone_makes_another() -> None:
    data = bytearray(_BYTES)
    wanted = digest_bytes(data)
    for at in (0, PIECE_BYTES - 1, PIECE_BYTES, len(data) - 1):
        data[at] ^= 1
        assert digest_bytes(data) != wanted
        data[at] ^= 1
    swapped = data[PIECE_BYTES : 2 * PIECE_BYTES] + data[:PIECE_BYTES] + data[2 * PIECE_BYTES :]
    assert digest_bytes(swapped) != wanted and digest_bytes(data[:-1]) != wanted
    assert digest_bytes(b"") != digest_bytes(b"\0") != digest_bytes(b"\0\0")


def test_what_is_no_digest() -> None:
    for text in ("", "x" * 32, "A" * 32, "0" * 31, "0" * 33, "é" * 32, "٣" * 32):
        assert not is_digest(text), text
