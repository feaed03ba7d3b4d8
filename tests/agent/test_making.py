"""Shards and parity that are made again of what is in memory, and parts that do not make them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from threading import Event

import pytest
from msgspec import structs

from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.transfer import making
from gemini_hpc.agent.transfer.pull import PullFailed
from gemini_hpc.core import parity
from gemini_hpc.core.copy import Copy, Member
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp

N, BLOCKS, SIZE = 5, 2, 1 << 16
STAMP = Stamp(1, 1)
Part = tuple[Memfd, Copy]


class Stripe:
    """Five shards of unequal length, each with its parity: rs:3+2."""

    def __init__(self) -> None:
        self.data = {rank: random.Random(rank).randbytes(SIZE - 1000 * rank) for rank in range(N)}
        self.opened: list[Memfd] = []
        self.shards: dict[int, Part] = {}
        for rank, data in self.data.items():
            memory = self.memory(SIZE)
            with memory.view() as view:
                view[: len(data)] = data
            copy = Copy("", rank, N, rank, SIZE, len(data), STAMP, digest_bytes(data))
            self.shards[rank] = memory, copy
        self.parities = {
            rank: self.beside(rank, [self.shards[o] for o in range(N) if o != rank]) for rank in range(N)
        }

    def memory(self, size: int) -> Memfd:
        self.opened.append(Memfd("gemini:test", size))
        return self.opened[-1]

    def wish(self, rank: int) -> Copy:
        copies = [self.shards[other][1] for other in range(N) if other != rank]
        of = tuple(Member(c.rank, c.home, c.bytes, c.used, c.digest) for c in copies)
        whole = parity.Stripe(tuple(range(N)), BLOCKS)
        room = whole.compute_block_bytes(SIZE)
        used = whole.compute_parity_bytes(rank, {c.rank: c.used for c in copies}, room)
        return Copy("", rank, N, rank, BLOCKS * room, used, STAMP, "", members=of, blocks=BLOCKS, room=room)

    def beside(self, rank: int, parts: list[Part]) -> Part:
        copy = self.wish(rank)
        memory = self.memory(copy.bytes)
        digest, _ = making.make(copy, memory, parts, Event())
        return memory, structs.replace(copy, digest=digest)

    def again(self, rank: int, parts: list[Part]) -> bytes:
        memory, (_, copy) = self.memory(SIZE), self.shards[rank]
        making.make(copy, memory, parts, Event())
        with memory.view() as view:
            return bytes(view[: copy.used])


@pytest.fixture
def stripe() -> Iterator[Stripe]:
    stripe = Stripe()
    yield stripe
    for memory in stripe.opened:
        memory.close()


@pytest.mark.parametrize("lost", [(0, 1), (1, 3), (4, 0), (2, 3)])
def test_two_lost_members_and_their_parity(stripe: Stripe, lost: tuple[int, int]) -> None:
    left = [rank for rank in range(N) if rank not in lost]
    parts = [*(stripe.shards[rank] for rank in left), *(stripe.parities[rank] for rank in left)]
    for rank in lost:
        assert stripe.again(rank, parts) == stripe.data[rank]
        assert stripe.beside(rank, parts)[1].digest == stripe.parities[rank][1].digest, "without the lost shards"


def test_too_few_parts(stripe: Stripe) -> None:
    with pytest.raises(PullFailed, match="can be found"):
        stripe.again(0, [stripe.shards[3], stripe.parities[3], stripe.shards[4], stripe.parities[4]])


def test_parts_that_belong_to_something_else(stripe: Stripe) -> None:
    memory, copy = stripe.parities[2]
    parts = [stripe.shards[rank] for rank in (1, 2, 3, 4)]
    for bad in (structs.replace(copy, room=copy.room - 4096), structs.replace(copy, blocks=1)):
        with pytest.raises(PullFailed):
            stripe.again(0, [*parts, (memory, bad)])


def test_a_parity_that_claims_to_be_anything(stripe: Stripe) -> None:
    """As a plan may say that came from a peer."""
    wish = stripe.wish(0)
    member = wish.members[0]
    for bad in (
        structs.replace(wish, room=1 << 40),
        structs.replace(wish, used=100),
        structs.replace(wish, members=tuple(structs.replace(member, rank=rank) for rank in range(1, 300))),
        structs.replace(wish, members=wish.members[:1], blocks=4),
    ):
        with pytest.raises(PullFailed):
            making.make(bad, stripe.memory(wish.bytes), [stripe.shards[rank] for rank in (1, 2, 3, 4)], Event())
