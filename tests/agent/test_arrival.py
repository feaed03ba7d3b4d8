"""A version's bytes over several connections: in any order, each once, and hashed whatever the order."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_hpc.agent.transfer import arrival as arrival_module
from gemini_hpc.agent.transfer.arrival import Arrival, Connection
from gemini_hpc.agent.transfer.stripes import cut_chunks
from gemini_hpc.core import ranges
from gemini_hpc.core.digest import PIECE_BYTES, digest_bytes
from gemini_hpc.wire import peer
from gemini_hpc.wire.link import LinkClosed

SIZE = 4 * PIECE_BYTES + 77
DATA = random.Random(5).randbytes(SIZE)


class Link:
    """A connection on which the bytes of a chunk come in steps."""

    def __init__(self, step: int) -> None:
        self.step, self.at = step, 0
        self.sent: list[int] = []

    def fill(self, view: memoryview, silent_s: float, take: Any) -> None:
        for at in range(0, len(view), self.step):
            with view[at : at + self.step] as part:
                part[:] = DATA[self.at + at : self.at + at + len(part)]
                take(part)

    def wait(self, timeout_s: float | None) -> bool:
        return False

    def send(self, message: peer.PushAck) -> None:
        self.sent.append(message.arrived)


def bring(into: Connection, offset: int, length: int) -> None:
    link: Any = into._link
    link.at = offset
    into.receive(peer.PushChunk(offset, length))


CUTS = st.lists(st.one_of(st.integers(1, SIZE - 1), st.sampled_from([PIECE_BYTES, 2 * PIECE_BYTES])), max_size=9)


@settings(max_examples=60, deadline=None)
@given(CUTS, CUTS, st.integers(1, 4), st.sampled_from([100_000, PIECE_BYTES // 2, SIZE]), st.randoms())
def test_chunks_in_any_order_give_the_digest_of_the_bytes(
    cuts: list[int], kept: list[int], count: int, step: int, order: random.Random
) -> None:
    there = [(a, b) for n, (a, b) in enumerate(pairwise(sorted({0, *kept, SIZE}))) if n % 2]
    slot = bytearray(SIZE)
    for start, end in there:
        slot[start:end] = DATA[start:end]
    arrival = Arrival(memoryview(slot), SIZE, there)
    present = [number for run in arrival.list_present_runs() for number in range(*run)]
    for number, start, end in arrival.pieces.enumerate_bounds(0, arrival.pieces.count):
        assert (number in present) == any(a <= start and end <= b for a, b in ranges.merge_ranges(there))
        if number in present:
            arrival.pieces.put(number, arrival_module.xxhash.xxh3_128_digest(slot[start:end]))
    links: list[Any] = [Link(step) for _ in range(count)]
    into = [Connection(arrival, link, 1.0) for link in links]
    chunks = []
    for start, end in ranges.list_gaps(there, SIZE):
        bounds = sorted({start, end, *(c for c in cuts if start < c < end)})
        chunks += [chunk for a, b in pairwise(bounds) for chunk in cut_chunks(a, b - a, count)]
    order.shuffle(chunks)
    for offset, length in chunks:
        assert arrival.missing >= length
        bring(order.choice(into), offset, length)
    for one in into:
        one.wait()
    assert arrival.missing == 0 and bytes(slot) == DATA and arrival.pieces.compute_digest() == digest_bytes(DATA)
    assert sum(link.sent[-1] for link in links if link.sent) == SIZE - ranges.count_bytes(there)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 9 * PIECE_BYTES), st.integers(1, 40 * PIECE_BYTES), st.integers(1, 8))
def test_chunks_are_cut_between_pieces(offset: int, length: int, count: int) -> None:
    chunks = cut_chunks(offset, length, count)
    assert chunks[0][0] == offset and sum(size for _, size in chunks) == length
    for (start, size), (after, _) in pairwise(chunks):
        assert start + size == after and after % PIECE_BYTES == 0
    if count > 1:
        assert all(0 < size <= 4 * PIECE_BYTES for _, size in chunks)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 10), (1500, 10), (999, 2), (1990, 20), (1000, 5000), (0, SIZE), (SIZE - 5, 6), (SIZE, 1), (1 << 49, 1)],
)
def test_bytes_that_are_not_missing_are_refused(offset: int, length: int) -> None:
    """There are bytes 0 to 1000 and 2000 to 3000, and 1100 to 1700 are on their way."""
    arrival = Arrival(memoryview(bytearray(SIZE)), SIZE, [(0, 1000), (2000, 3000)])
    arrival.claim(1100, 600)
    with pytest.raises(LinkClosed, match="not all missing"):
        arrival.claim(offset, length)
    arrival.claim(1000, 100)
    arrival.claim(1700, 300)
    arrival.claim(3000, SIZE - 3000)
    with pytest.raises(LinkClosed):
        arrival.claim(1000, 1)
    assert arrival.missing == SIZE - 2000, "nothing has come"


def test_gaps_are_bounded() -> None:
    arrival = Arrival(memoryview(bytearray(SIZE)), SIZE)
    with pytest.raises(LinkClosed, match="gaps"):
        for at in range(0, SIZE, 2):
            arrival.claim(at, 1)
