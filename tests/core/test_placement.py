from __future__ import annotations

import time
from itertools import combinations, product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core import placement
from gemini_hpc.core.placement import (
    PlacementOrder,
    can_survive,
    choose_others,
    compute_recovery_probability,
    list_groups,
    list_holders,
    list_homes,
)

sizes = st.integers(1, 40).flatmap(lambda N: st.tuples(st.just(N), st.integers(1, N)))


def test_the_figures_of_the_paper() -> None:
    assert list_groups(4, 2) == [[0, 1], [2, 3]]
    assert list_groups(5, 2) == [[0, 1], [2, 3, 4]]  # figure 3c
    assert [list_holders(i, 5, 2) for i in range(5)] == [(0, 1), (1, 0), (2, 3), (3, 4), (4, 2)]
    assert round(compute_recovery_probability(16, 2, 2), 3) == 0.933
    assert compute_recovery_probability(16, 2, 3) == 0.8


@given(sizes)
def test_every_shard_has_m_holders_and_every_node_keeps_m(size: tuple[int, int]) -> None:
    N, m = size
    G = list_groups(N, m)
    assert [node for group in G for node in group] == list(range(N))
    assert len(G) == N // m
    assert all(len(group) == m for group in G[:-1])
    kept = dict.fromkeys(range(N), 0)
    for node in range(N):
        found = list_holders(node, N, m)
        assert found[0] == node == list_homes(node, N, m)[0]
        assert len(set(found)) == m
        assert any(set(found) <= set(group) for group in G)
        for holder in found:
            kept[holder] += 1
            assert node in list_homes(holder, N, m)
    assert set(kept.values()) == {m}


def test_probability_is_what_counting_gives() -> None:
    for N in range(1, 9):
        for m in range(1, N + 1):
            for k in range(N + 1):
                good = sum(can_survive(N, m, set(lost)) for lost in combinations(range(N), k))
                assert compute_recovery_probability(N, m, k) == pytest.approx(good / comb(N, k), abs=1e-12), (N, m, k)


@given(sizes, st.data())
def test_in_another_order_the_same_holds_under_other_names(size: tuple[int, int], data: st.DataObject) -> None:
    N, m = size
    order = PlacementOrder(tuple(data.draw(st.permutations(range(N)))))
    for position in range(N):
        node = order.find_rank(position)
        assert order.find_position(node, N) == position
        assert list_holders(node, N, m, order) == tuple(map(order.find_rank, list_holders(position, N, m)))
        assert list_homes(node, N, m, order) == tuple(map(order.find_rank, list_homes(position, N, m)))
        ring = placement.list_ring(node, N, m, order)
        assert (ring[:m], (ring[0], *ring[:0:-1])[:m]) == (
            list_holders(node, N, m, order),
            list_homes(node, N, m, order),
        )
        others = choose_others(position, N, m, range(N))
        assert choose_others(node, N, m, range(N), order=order) == tuple(map(order.find_rank, others))


@given(sizes, st.data())
def test_survivable_is_a_holder_left_for_each(size: tuple[int, int], data: st.DataObject) -> None:
    N, m = size
    failed = data.draw(st.sets(st.integers(0, N - 1)))
    assert can_survive(N, m, failed) == all(set(list_holders(node, N, m)) - failed for node in range(N))
    assert can_survive(N, m, set(list(failed)[: m - 1]))


@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_corollary_1(q: int, m: int, data: st.DataObject) -> None:
    N = q * m
    k = data.draw(st.integers(0, N))
    bound = 1.0 if k < m else max(0.0, 1 - N * comb(N - m, k - m) / (m * comb(N, k)))
    if k < 2 * m:
        assert compute_recovery_probability(N, m, k) == pytest.approx(bound)
    else:
        assert compute_recovery_probability(N, m, k) >= bound - 1e-12


def _fewest_fatal_sets(N: int, m: int) -> int:
    """Over all placements that keep an own copy: the fewest distinct holder sets (k = m, proof of theorem 1)."""
    if N <= 5:
        choices = [
            [frozenset({i, *others}) for others in combinations(sorted(set(range(N)) - {i}), m - 1)] for i in range(N)
        ]
        return min(len(set(placed)) for placed in product(*choices))
    trainings = [frozenset(chosen) for chosen in combinations(range(N), m)]
    # A placement's sets cover all nodes, and any cover is a placement: each node picks a set that holds it.
    return next(
        n for n in range(1, N + 1) for some in combinations(trainings, n) if len(frozenset().union(*some)) == N
    )


def test_theorem_1_against_all_placements() -> None:
    for N in range(2, 8):
        for m in range(2, N + 1):
            best = 1 - _fewest_fatal_sets(N, m) / comb(N, m)
            ours = compute_recovery_probability(N, m, m)
            if N % m == 0:
                assert ours == pytest.approx(best), (N, m)
            else:
                assert best - ours <= (2 * m - 3) / comb(N, m) + 1e-12, (N, m)


def test_a_ring_is_what_counting_gives() -> None:
    """And the paper's bound is one."""
    for N in range(1, 11):
        for m in range(1, min(N, 4) + 1):
            for k in range(N + 1):
                chosen = [set(c) for c in combinations(range(N), k)]
                good = sum(not any(all((x + i) % N in c for i in range(m)) for x in range(N)) for c in chosen)
                assert placement.compute_ring_probability(N, m, k) == pytest.approx(good / len(chosen)), (N, m, k)
                assert placement.compute_ring_bound(N, m, k) <= placement.compute_ring_probability(N, m, k) + 1e-12, (
                    N,
                    m,
                    k,
                )


def test_large_jobs_are_counted_quickly() -> None:
    placement.compute_recovery_probability.cache_clear()
    start = time.perf_counter()
    values = [compute_recovery_probability(N, m, k) for N in (1000, 1001) for m in (2, 3) for k in (1, 2, 3)]
    assert time.perf_counter() - start < 0.5
    assert values[:3] == [1.0, pytest.approx(1 - 1 / 999), pytest.approx(1 - 500 * 998 / comb(1000, 3))]
    assert 0 <= compute_recovery_probability(1000, 3, 500) <= 1
    assert 0 < compute_recovery_probability(100_000, 2, 1000) < compute_recovery_probability(100_001, 3, 1000) < 1
    assert placement.compute_ring_probability(100_000, 2, 100) < compute_recovery_probability(100_000, 2, 100)


def test_impossible_replicas_are_told() -> None:
    for N, m, sentence in ((4, 0, "at least 1"), (2, 3, "3 replicas asked for on 2 nodes")):
        assert sentence in refusal(ValueError, list_groups, N, m), (N, m)


def test_ranks_and_losses_out_of_range_are_told() -> None:
    with pytest.raises(ValueError, match=r"node rank 4 is outside 0\.\.3"):
        list_holders(4, 4, 2)
    with pytest.raises(ValueError, match=r"outside 0\.\.3"):
        can_survive(4, 2, {7})
    with pytest.raises(ValueError, match="5 lost nodes of 4"):
        compute_recovery_probability(4, 2, 5)


@given(st.integers(2, 40), st.data())
def test_outlines_go_to_others_than_the_holders(N: int, data: st.DataObject) -> None:
    m, node = data.draw(st.integers(1, N)), data.draw(st.integers(0, N - 1))
    live = data.draw(st.sets(st.integers(-2, N + 2)))
    found = choose_others(node, N, m, live)
    able = {c for c in live if 0 <= c < N} - set(list_holders(node, N, m))
    assert set(found) <= able and len(set(found)) == len(found) == min(3, len(able))


def test_outlines_do_not_go_to_neighbours_only() -> None:
    assert choose_others(2, 4, 2, range(4)) == (0, 1)
    assert choose_others(0, 6, 2, range(6)) == (2, 3, 4)
    assert choose_others(10, 1000, 2, range(1000)) == (12, 344, 677)
