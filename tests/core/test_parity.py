"""Parity of shards of any sizes: whichever member of a stripe is lost, what the others have makes it again."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core import parity, placement
from gemini_hpc.core.parity import Fold
from gemini_hpc.core.redundancy import Redundancy

sizes = st.integers(1, 40_000)


def xored(into: bytearray, folds: list[Fold], shards: dict[int, bytes], parities: dict[int, bytes]) -> bytes:
    for fold in folds:
        source = (parities if fold.parity else shards)[fold.rank]
        for index, byte in enumerate(source[fold.start : fold.end]):
            into[fold.at + index] ^= byte
    return bytes(into)


@given(st.lists(sizes, min_size=2, max_size=5), st.data())
def test_any_one_member_comes_back_byte_for_byte(used: list[int], data: st.DataObject) -> None:
    stripe = tuple(sorted(data.draw(st.sets(st.integers(0, 99), min_size=len(used), max_size=len(used)))))
    dice = random.Random(1)
    shards = {rank: dice.randbytes(size) for rank, size in zip(stripe, used, strict=True)}
    lengths = {rank: len(shard) for rank, shard in shards.items()}
    parities = {
        rank: xored(
            bytearray(parity.parity_bytes(stripe, rank, lengths)), parity.encoding(stripe, rank, lengths), shards, {}
        )
        for rank in stripe
    }
    lost = data.draw(st.sampled_from(stripe))
    left = {rank: shard for rank, shard in shards.items() if rank != lost}
    kept = {rank: made for rank, made in parities.items() if rank != lost}
    again = xored(bytearray(lengths[lost]), parity.decoding(stripe, lost, lengths), left, kept)
    assert again == shards[lost]
    assert xored(bytearray(len(parities[lost])), parity.encoding(stripe, lost, lengths), left, {}) == parities[lost]


@given(st.integers(2, 8), st.integers(1, 1 << 40))
def test_a_shards_blocks_are_all_of_it_and_one_holders_each(members: int, used: int) -> None:
    stripe = tuple(range(members))
    parts = sorted(parity.part(stripe, 1, holder, used) for holder in stripe if holder != 1)
    end = 0
    for start, stop in parts:
        assert start == end and (start % parity.ALIGN_BYTES == 0 or start == used)
        end = stop
    assert end == used
    assert max(stop - start for start, stop in parts) <= -(-used // (members - 1)) + parity.ALIGN_BYTES


def test_a_rank_has_nothing_in_its_own_parity() -> None:
    with pytest.raises(ValueError, match="its own parity"):
        parity.part((0, 1), 1, 1, 5)


@given(st.integers(1, 9), st.integers(1, 3), st.data())
def test_the_stripes_of_a_job(N: int, ranks: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, N))
    homes = data.draw(st.permutations([node for node in range(N) for _ in range(ranks)]))
    found = parity.stripes(homes, placement.groups(N, n))
    for rank, stripe in enumerate(found):
        group = placement.groups(N, n)[placement.group_of(homes[rank], N, n)]
        assert rank in stripe and sorted(homes[r] for r in stripe) == group
        assert all(found[other] == stripe for other in stripe)


def test_nodes_of_a_group_with_unequal_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="node rank 1 has 1, node rank 0 has 2"):
        parity.stripes([0, 0, 1], [[0, 1]])


@given(st.integers(2, 9), st.data())
def test_one_node_of_each_group_may_be_lost(N: int, data: st.DataObject) -> None:
    here = Redundancy(N, data.draw(st.integers(2, N)), xor=True)
    lost = data.draw(st.sets(st.integers(0, N - 1)))
    groups = [set(here.group(node)) for node in range(N)]
    assert here.survives(lost) == all(len(group & lost) < 2 for group in groups)
    for node in range(N):
        assert here.holders(node) == (node,) and {node, *here.receivers(node)} == groups[node] == here.peers(node)
    order = placement.Order(tuple(data.draw(st.permutations(range(N)))))
    there = parity.targets(range(N), (here._replace(order=order).group(node) for node in range(N)))
    assert all(set(found) == set(here._replace(order=order).receivers(rank)) for rank, found in enumerate(there))


@given(st.integers(2, 9), st.data())
def test_the_probability_is_the_share_of_the_choices(N: int, data: st.DataObject) -> None:
    here = Redundancy(N, data.draw(st.integers(2, N)), xor=True)
    for k in range(N + 1):
        choices = list(combinations(range(N), k))
        assert here.recovery_probability(k) == pytest.approx(sum(map(here.survives, choices)) / len(choices))
    with pytest.raises(ValueError, match="lost nodes"):
        here.recovery_probability(N + 1)


def test_with_whole_copies_it_is_the_placement() -> None:
    here = Redundancy(5, 2)
    assert (here.pairs, here.holders(4), here.receivers(4)) == (2, (4, 2), (2,))
    assert here.peers(3) == {2, 3, 4} and here.survives([0, 2]) and not here.survives([0, 1])
