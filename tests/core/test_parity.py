"""Parity of shards of any sizes: whichever member of a stripe is lost, what the others have makes it again."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core import gf256, parity, placement, redundancy
from gemini_hpc.core.parity import ParityTerm, Stripe
from gemini_hpc.core.redundancy import Redundancy

sizes = st.integers(1, 40_000)


def folded(into: bytearray, folds: list[ParityTerm], shards: dict[int, bytes], parities: dict[int, bytes]) -> bytes:
    for fold in folds:
        source = (parities if fold.parity else shards)[fold.rank]
        for index, byte in enumerate(source[fold.start : fold.end]):
            into[fold.offset + index] ^= gf256.multiply(byte, fold.factor)
    return bytes(into)


def lengths_of(shards: dict[int, bytes]) -> dict[int, int]:
    return {rank: len(shard) for rank, shard in shards.items()}


def parity_beside(stripe: Stripe, rank: int, shards: dict[int, bytes]) -> bytes:
    lengths, room = lengths_of(shards), room_of(stripe, shards)
    size = stripe.compute_parity_bytes(rank, lengths, room)
    assert size <= stripe.blocks * room
    return folded(bytearray(size), stripe.derive_encoding(rank, lengths, room), shards, {})


def room_of(stripe: Stripe, shards: dict[int, bytes]) -> int:
    return max(stripe.compute_block_bytes(len(shard)) for shard in shards.values())


@st.composite
def stripes_of(draw: st.DrawFn) -> tuple[Stripe, dict[int, bytes]]:
    """A stripe and its shards."""
    ranks = tuple(sorted(draw(st.sets(st.integers(0, 99), min_size=2, max_size=7))))
    dice = random.Random(1)
    shards = {rank: dice.randbytes(draw(sizes)) for rank in ranks}
    return Stripe(ranks, draw(st.integers(1, min(4, len(ranks) - 1)))), shards


@settings(deadline=None)
@given(stripes_of(), st.data())
def test_any_m_members_come_back_byte_for_byte(case: tuple[Stripe, dict[int, bytes]], data: st.DataObject) -> None:
    stripe, shards = case
    lengths, room = lengths_of(shards), room_of(stripe, shards)
    parities = {rank: parity_beside(stripe, rank, shards) for rank in stripe.ranks}
    lost = data.draw(st.sets(st.sampled_from(stripe.ranks), min_size=1, max_size=stripe.blocks))
    left = {rank: shard for rank, shard in shards.items() if rank not in lost}
    kept = {rank: made for rank, made in parities.items() if rank not in lost}
    for rank in lost:
        assert stripe.can_decode(rank, left.keys(), kept.keys())
        folds = stripe.derive_decoding(rank, lengths, left.keys(), dict.fromkeys(kept, room))
        assert folded(bytearray(lengths[rank]), folds, left, kept) == shards[rank]


@settings(deadline=None)
@given(stripes_of(), st.data())
def test_what_cannot_be_found_is_said_and_all_else_is_found(
    case: tuple[Stripe, dict[int, bytes]], data: st.DataObject
) -> None:
    """Shards and parities lost in any combination, as by the death of agents. Full shards: `can_decode` is exact."""
    stripe, _ = case
    ranks, cut = stripe.ranks, len(stripe.ranks) - stripe.blocks
    shards = {rank: random.Random(rank).randbytes(4096 * cut) for rank in ranks}
    lengths, room = lengths_of(shards), room_of(stripe, shards)
    whole = data.draw(st.sets(st.sampled_from(ranks)))
    beside = data.draw(st.sets(st.sampled_from(ranks)))
    kept = {rank: parity_beside(stripe, rank, shards) for rank in beside}
    for rank in set(ranks) - whole:
        try:
            folds = stripe.derive_decoding(rank, lengths, whole, dict.fromkeys(beside - {rank}, room))
        except ValueError as error:
            assert "only" in str(error) and not stripe.can_decode(rank, whole, beside - {rank})
            continue
        assert stripe.can_decode(rank, whole, beside - {rank})
        assert folded(bytearray(lengths[rank]), folds, shards, kept) == shards[rank]


@settings(deadline=None)
@given(stripes_of(), st.data())
def test_parity_is_made_without_the_lost_shards(case: tuple[Stripe, dict[int, bytes]], data: st.DataObject) -> None:
    """Its holder has come in the place of a lost node; others of the stripe are lost as well."""
    stripe, shards = case
    lengths, room = lengths_of(shards), room_of(stripe, shards)
    lost = data.draw(st.sets(st.sampled_from(stripe.ranks), min_size=1, max_size=stripe.blocks))
    holder = data.draw(st.sampled_from(sorted(lost)))
    left = {rank: shard for rank, shard in shards.items() if rank not in lost}
    kept = {rank: parity_beside(stripe, rank, shards) for rank in left}
    rooms = dict.fromkeys(kept, room)
    folds = stripe.derive_encoding_without(holder, lengths, left.keys(), rooms, room)
    wanted = parity_beside(stripe, holder, shards)
    assert folded(bytearray(len(wanted)), folds, left, kept) == wanted


def test_one_more_than_m_is_too_many() -> None:
    ranks, lengths = (0, 1, 2, 3, 4, 5), dict.fromkeys(range(6), 40_000)
    for blocks in (1, 2, 3):
        stripe = Stripe(ranks, blocks)
        for lost in combinations(ranks, blocks + 1):
            left = set(ranks) - set(lost)
            assert not stripe.can_decode(lost[0], left, left)
            with pytest.raises(ValueError, match="can be found"):
                stripe.derive_decoding(lost[0], lengths, left, dict.fromkeys(left, 1 << 20))


def test_with_one_block_all_is_exclusive_or() -> None:
    stripe, lengths = Stripe((0, 1, 2, 3)), dict.fromkeys(range(4), 30_000)
    decoding = stripe.derive_decoding(2, lengths, {0, 1, 3}, dict.fromkeys((0, 1, 3), 0))
    assert {fold.factor for fold in (*stripe.derive_encoding(2, lengths), *decoding)} == {1}


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 1 << 40), st.data())
def test_a_share_is_the_part_in_order(members: int, blocks: int, used: int, data: st.DataObject) -> None:
    stripe = Stripe(tuple(range(members)), min(blocks, members - 1))
    rank, holder = data.draw(st.permutations(stripe.ranks))[:2]
    start, end = stripe.find_part(rank, holder, used)
    at = start
    for fold in stripe.derive_share(rank, holder, used, 1 << 41):
        assert fold.start == at and fold.factor
        at = fold.end
    assert at == end


@given(st.integers(2, 8), st.integers(1, 1 << 40))
def test_a_shards_blocks_are_all_of_it_and_one_holders_each(members: int, used: int) -> None:
    stripe = Stripe(tuple(range(members)))
    parts = sorted(stripe.find_part(1, holder, used) for holder in stripe.ranks if holder != 1)
    end = 0
    for start, stop in parts:
        assert start == end and (start % parity.ALIGN_BYTES == 0 or start == used)
        end = stop
    assert end == used
    assert max(stop - start for start, stop in parts) <= -(-used // (members - 1)) + parity.ALIGN_BYTES


def test_a_rank_has_nothing_in_its_own_parity() -> None:
    with pytest.raises(ValueError, match="its own parity"):
        Stripe((0, 1)).find_part(1, 1, 5)


@given(st.integers(1, 9), st.integers(1, 3), st.data())
def test_the_stripes_of_a_job(N: int, ranks: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, N))
    homes = data.draw(st.permutations([node for node in range(N) for _ in range(ranks)]))
    found = parity.build_stripes(homes, placement.list_groups(N, n))
    for rank, stripe in enumerate(found):
        group = next(group for group in placement.list_groups(N, n) if homes[rank] in group)
        assert rank in stripe and sorted(homes[r] for r in stripe) == group
        assert all(found[other] == stripe for other in stripe)


def test_nodes_of_a_group_with_unequal_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="node rank 1 has 1, node rank 0 has 2"):
        parity.build_stripes([0, 0, 1], [[0, 1]])


@given(st.integers(2, 9), st.data())
def test_as_many_nodes_of_each_group_may_be_lost(N: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(2, N))
    here = Redundancy(N, m, data.draw(st.integers(1, min(4, m - 1))))
    lost = data.draw(st.sets(st.integers(0, N - 1)))
    groups = [set(here.list_group(node)) for node in range(N)]
    assert here.can_survive(lost) == all(len(group & lost) <= here.tolerates for group in groups)
    for node in range(N):
        assert here.list_holders(node) == (node,) and {node, *here.list_receivers(node)} == groups[
            node
        ] == here.list_peers(node)
    order = placement.PlacementOrder(tuple(data.draw(st.permutations(range(N)))))
    there = parity.list_targets(range(N), (here._replace(order=order).list_group(node) for node in range(N)))
    assert all(set(found) == set(here._replace(order=order).list_receivers(rank)) for rank, found in enumerate(there))


@given(st.integers(2, 9), st.data())
def test_the_probability_is_the_share_of_the_choices(N: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(2, N))
    here = Redundancy(N, m, data.draw(st.integers(1, min(4, m - 1))))
    for k in range(N + 1):
        choices = list(combinations(range(N), k))
        assert here.compute_recovery_probability(k) == pytest.approx(
            sum(map(here.can_survive, choices)) / len(choices)
        )
    with pytest.raises(ValueError, match="lost nodes"):
        here.compute_recovery_probability(N + 1)


def test_with_whole_copies_it_is_the_placement() -> None:
    here = Redundancy(5, 2)
    assert (here.pairs, here.list_holders(4), here.list_receivers(4)) == (2, (4, 2), (2,))
    assert here.list_peers(3) == {2, 3, 4} and here.can_survive([0, 2]) and not here.can_survive([0, 1])


def test_what_the_option_asks_for() -> None:
    for text, wanted, name in (
        ("xor", (4, 1), "xor:4"),
        ("xor:2", (2, 1), "xor:2"),
        ("rs:4+2", (6, 2), "rs:4+2"),
        ("rs:28+4", (32, 4), "rs:28+4"),
    ):
        assert redundancy.parse_redundancy(text) == wanted and redundancy.format_redundancy(*wanted) == name, text


def test_another_value_is_refused() -> None:
    for text in ("xor:1", "xor:33", "xor:04", "rs:4", "rs:4+5", "rs:29+4", "rs:0+1", "rs:4+2 ", "raid"):
        assert "wanted replicate" in refusal(ValueError, redundancy.parse_redundancy, text), text


def test_one_hundred_thousand_nodes_are_counted() -> None:
    here = Redundancy(100_000, 6, 2)
    assert here.compute_recovery_probability(2) == 1.0 and 0 < 1 - here.compute_recovery_probability(3) < 1e-8
