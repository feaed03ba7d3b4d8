from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from itertools import combinations, permutations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core import domains, placement
from gemini_hpc.core.domains import Shared, arrange_nodes, find_fatal_domains, measure_separation
from gemini_hpc.core.placement import AS_RANKED, PlacementOrder

small = st.integers(2, 8).flatmap(
    lambda N: st.tuples(
        st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=N, max_size=N), st.integers(2, min(3, N))
    )
)
paths = st.lists(st.sampled_from(["", "s.a", "s.b", "t.c", "t.d", "t.e"]), min_size=2, max_size=40)


def pairs(found: PlacementOrder, of: list[str], m: int) -> int:
    """Pairs of nodes that are in one group and one domain."""
    ranks = [found.find_rank(position) for position in range(len(of))]
    return sum(
        of[ranks[a]] == of[ranks[b]] != ""
        for group in placement.list_groups(len(of), m)
        for a, b in combinations(group, 2)
    )


def fewest_pairs(of: list[str], m: int) -> int:
    """By trying every distribution of the domains' nodes over the groups."""
    sizes = [len(group) for group in placement.list_groups(len(of), m)]
    names = sorted(set(of) - {""})
    counts = tuple(of.count(name) for name in names)

    def shares(left: tuple[int, ...], room: int, free: int) -> Iterator[tuple[int, ...]]:
        if not left:
            if room <= free:
                yield ()
            return
        for take in range(min(left[0], room) + 1):
            for rest in shares(left[1:], room - take, free):
                yield (take, *rest)

    @cache
    def least(g: int, left: tuple[int, ...], free: int) -> int:
        if g == len(sizes):
            return 0
        return min(
            sum(comb(take, 2) for take in share)
            + least(g + 1, tuple(a - b for a, b in zip(left, share, strict=True)), free - sizes[g] + sum(share))
            for share in shares(left, sizes[g], free)
        )

    return least(0, counts, of.count(""))


@given(small)
@settings(max_examples=400)
def test_no_other_order_has_fewer_pairs(case: tuple[list[str], int]) -> None:
    of, m = case
    found = arrange_nodes(of, m)
    assert pairs(found, of, m) == fewest_pairs(of, m)
    told = measure_separation(
        {f"n{r}": name for r, name in enumerate(of)}, {f"n{r}": r for r in range(len(of))}, m, found
    )
    if told is not None:
        assert bool(told.shared) == (pairs(found, of, m) > 0)
        assert told.known == sum(map(bool, of))
    else:
        assert not any(of)


@given(
    st.integers(2, 6).flatmap(
        lambda N: st.tuples(
            st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=N, max_size=N), st.integers(2, min(3, N))
        )
    )
)
@settings(max_examples=60, deadline=None)
def test_as_many_domains_can_be_lost_as_in_any_order(case: tuple[list[str], int]) -> None:
    of, m = case
    least = min(len(find_fatal_domains(of, m, PlacementOrder(ranks))) for ranks in permutations(range(len(of))))
    assert len(find_fatal_domains(of, m, arrange_nodes(of, m))) == least


def test_two_racks_of_two() -> None:
    assert arrange_nodes(["rack1", "rack1", "rack2", "rack2"], 2) == PlacementOrder((0, 2, 1, 3))
    assert find_fatal_domains(["rack1", "rack1", "rack2", "rack2"], 2) == {"rack1", "rack2"}
    assert find_fatal_domains(["rack1", "rack1", "rack2", "rack2"], 2, PlacementOrder((0, 2, 1, 3))) == set()


def test_ranks_keep_their_places_where_nothing_is_better() -> None:
    for of in (
        ["", "", "", ""],
        ["a", "a", "a", "a"],
        ["a", "b", "a", "b"],
        ["a", "b", "c", "d"],
        ["a", "", "a", ""],
    ):
        assert arrange_nodes(of, 2) is AS_RANKED, of


def test_the_wider_domains_are_kept_apart_too() -> None:
    of = [f"spine{r // 4}.leaf{r // 2}" for r in range(8)]
    found = arrange_nodes(of, 2)
    spines = [name.split(".")[0] for name in of]
    assert pairs(found, of, 2) == pairs(found, spines, 2) == 0


@given(paths, st.integers(1, 4))
def test_it_is_an_order_that_depends_on_nothing_else(of: list[str], m: int) -> None:
    m = min(m, len(of))
    found = arrange_nodes(of, m)
    assert found == arrange_nodes(list(of), m)
    assert sorted(found.ranks) == list(range(len(of))) or found is AS_RANKED
    assert pairs(found, of, m) <= pairs(AS_RANKED, of, m)
    if m > 1:
        assert find_fatal_domains(of, m, found) == {
            name
            for name in set(of) - {""}
            if not placement.can_survive(len(of), m, {r for r, d in enumerate(of) if d == name}, found)
        }


@given(paths, st.integers(2, 4))
def test_what_is_shared_is_named(of: list[str], m: int) -> None:
    m = min(m, len(of))
    ranks = {f"n{rank}": rank for rank in range(len(of))}
    told = measure_separation({f"n{rank}": name for rank, name in enumerate(of)}, ranks, m, AS_RANKED)
    assert (told is None) == (not any(of))
    for shared in told.shared if told is not None else ():
        assert len(shared.hosts) > 1
        assert {of[ranks[host]] for host in shared.hosts} == {shared.domain}
        together = {ranks[host] for host in shared.hosts}
        assert any(together <= set(group) for group in placement.list_groups(len(of), m))


def test_what_is_told_has_bounds() -> None:
    of = {f"n{rank:03}": f"rack{rank // 2}" for rank in range(100)}
    told = measure_separation(of, {host: rank for rank, host in enumerate(sorted(of))}, 2, AS_RANKED)
    assert told is not None and told.known == 100
    assert told.shared[0] == Shared("rack0", ("n000", "n001"))
    assert (len(told.shared), told.more) == (domains.MAX_SHARED, 50 - domains.MAX_SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("m", [2, 3])
def test_a_hundred_thousand_nodes(m: int) -> None:
    of = [f"s{rank // 1024}.l{rank // 32}" for rank in range(100_001)]
    began = time.process_time()
    found = arrange_nodes(of, m)
    assert time.process_time() - began < 20
    assert not find_fatal_domains(of, m, found) and pairs(found, of, m) == 0


def test_what_is_no_order_is_refused() -> None:
    for ranks in ((0, 0), (1, 2), (-1, 0)):
        assert "an order of 2 node ranks has" in refusal(ValueError, PlacementOrder, ranks), ranks


def test_an_order_is_of_so_many_nodes() -> None:
    with pytest.raises(ValueError, match="an order of 2 node ranks for 4 nodes"):
        placement.list_holders(0, 4, 2, PlacementOrder((1, 0)))
