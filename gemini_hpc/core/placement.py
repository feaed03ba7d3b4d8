"""Placement of shards on nodes: Algorithm 1 of the GEMINI paper (SOSP '23, section 4), node ranks from 0.

Letters as in the paper: N nodes, m replicas (the own copy included), k nodes lost at once. N/m whole groups keep
each other's shards. If m does not divide N, the last group takes the rest and is a ring.

Groups consist of adjacent nodes in a `PlacementOrder`: the order of the node ranks, or an order that keeps failure
domains apart (`core.domains`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import comb


def _check_replicas(N: int, m: int) -> None:
    if m < 1:
        raise ValueError(f"{m} replicas asked for: at least 1 (the node's own copy) is needed")
    if m > N:
        raise ValueError(f"{m} replicas asked for on {N} node{'s' if N != 1 else ''}: at most one per node")


def _check_rank(node_rank: int, N: int) -> None:
    if not 0 <= node_rank < N:
        raise ValueError(f"node rank {node_rank} is outside 0..{N - 1}")


@dataclass(frozen=True, slots=True)
class PlacementOrder:
    """An order of placement.

    `ranks` has the node rank at each position of the placement. If it is empty, each rank stands at its own
    position.

    Raises:
        ValueError: `ranks` is no permutation of 0..N-1.
    """

    ranks: tuple[int, ...] = ()
    _positions: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        positions = [-1] * len(self.ranks)
        for position, rank in enumerate(self.ranks):
            if not 0 <= rank < len(positions) or positions[rank] >= 0:
                raise ValueError(f"an order of {len(positions)} node ranks has {rank} at position {position}")
            positions[rank] = position
        object.__setattr__(self, "_positions", tuple(positions))

    def find_position(self, node_rank: int, N: int) -> int:
        """Return the position of a node rank.

        Raises:
            ValueError: No node of N has this rank, or the order is for another N.
        """
        _check_rank(node_rank, N)
        if not self.ranks:
            return node_rank
        if len(self.ranks) != N:
            raise ValueError(f"an order of {len(self.ranks)} node ranks for {N} nodes")
        return self._positions[node_rank]

    def find_rank(self, position: int) -> int:
        """Return the node rank at a position."""
        return self.ranks[position] if self.ranks else position


AS_RANKED = PlacementOrder()


def list_groups(N: int, m: int) -> list[list[int]]:
    """Return the group list G of Algorithm 1: floor(N/m) groups of m node ranks, the last with the N mod m more.

    Raises:
        ValueError: m < 1 or m > N, as in every function here.
    """
    _check_replicas(N, m)
    q = N // m
    G = [list(range(m * i, m * i + m)) for i in range(q)]
    G[-1].extend(range(q * m, N))
    return G


def list_ring(node_rank: int, N: int, m: int, order: PlacementOrder = AS_RANKED) -> tuple[int, ...]:
    """Return the node's group, from the node itself on around.

    The m - 1 nodes that follow keep its shards. The m - 1 nodes at the end are those whose shards it keeps. A whole
    group is a ring of m nodes.
    """
    if not (0 <= node_rank < N and 1 <= m <= N):  # in one test, because this runs for every node of a large job
        _check_replicas(N, m)
    own, last = order.find_position(node_rank, N), (N // m - 1) * m
    first, size = (own // m * m, m) if own < last else (last, N - last)
    found = tuple([first + (own - first + step) % size for step in range(size)])
    return found if not order.ranks else tuple([order.ranks[position] for position in found])


def list_holders(node_rank: int, N: int, m: int, order: PlacementOrder = AS_RANKED) -> tuple[int, ...]:
    """Return the m nodes that keep a node's shards: itself, then the next m-1 of its group, cyclically."""
    return list_ring(node_rank, N, m, order)[:m]


def list_homes(node_rank: int, N: int, m: int, order: PlacementOrder = AS_RANKED) -> tuple[int, ...]:
    """Return the m nodes whose shards a node keeps: itself, then the m-1 before it in its group, cyclically."""
    found = list_ring(node_rank, N, m, order)
    return (found[0], *found[:0:-1])[:m]


Keepers = Mapping[int, Sequence[int]]  # by node rank: its `list_holders`


def find_stranger(keepers: Keepers) -> tuple[int, int] | None:
    """Return a node rank, and one of its holders on which the training has no rank, if there is one.

    The training has ranks on the nodes of `keepers`. A holder without a rank cannot receive the copy. None means
    that there is no such holder.
    """
    missing = ((home, h) for home, found in keepers.items() for h in found if h not in keepers)
    return next(missing, None)


def list_targets(homes: Sequence[int], keepers: Keepers) -> list[list[int]]:
    """Return, for each rank, the ranks that receive its shard.

    `homes` has the node rank of each rank of a program. The ranks of a node are spread over those of a holder.
    """
    on_node: dict[int, list[int]] = {node: [] for node in homes}
    for rank, home in enumerate(homes):
        on_node[home].append(rank)

    def choose_targets(rank: int) -> list[int]:
        index = on_node[homes[rank]].index(rank)
        others = keepers[homes[rank]][1:]
        return [on_node[h][index % len(on_node[h])] for h in others]

    return [choose_targets(rank) for rank in range(len(homes))]


def choose_others(
    node_rank: int, N: int, m: int, candidates: Iterable[int], most: int = 3, order: PlacementOrder = AS_RANKED
) -> tuple[int, ...]:
    """Return up to `most` candidates that are not holders of a node.

    The ranks of the candidates have the node's shards in their tensors as well. The choice starts from the next node
    and is spread evenly around the ring, because adjacent nodes are lost together more often.
    """
    kept, own = set(list_holders(node_rank, N, m, order)), order.find_position(node_rank, N)
    found = sorted({c for c in candidates if 0 <= c < N} - kept, key=lambda c: (order.find_position(c, N) - own) % N)
    count = min(most, len(found))
    return tuple(found[turn * len(found) // count] for turn in range(count))


def can_survive(N: int, m: int, failed: Iterable[int], order: PlacementOrder = AS_RANKED) -> bool:
    """Return whether every node's shards keep a holder if the nodes of `failed` are lost at once."""
    _check_replicas(N, m)
    lost = set(failed)
    for node_rank in lost:
        _check_rank(node_rank, N)
    return not any(lost.issuperset(list_holders(node_rank, N, m, order)) for node_rank in lost)


@lru_cache(maxsize=256)
def compute_recovery_probability(N: int, m: int, k: int) -> float:
    """Return the probability that the loss of k nodes at once, all choices alike, leaves memory recoverable.

    The result is exact for every k.

    The paper's Corollary 1 is exact only for m <= k < 2m and m | N. Here lost whole groups are counted by inclusion
    and exclusion. The last group, if it is a ring, is counted for each number of its nodes that is lost. 100,000
    nodes take well below a second.
    """
    _check_replicas(N, m)
    if not 0 <= k <= N:
        raise ValueError(f"{k} lost nodes of {N}: between 0 and {N} can be lost")
    q, rest = divmod(N, m)
    if not rest:
        return _count_group_choices(q, m, k) / comb(N, k)
    of_ring = _count_ring_choices(m + rest, m, k)
    return sum(ways * _count_group_choices(q - 1, m, k - i) for i, ways in enumerate(of_ring) if ways) / comb(N, k)


def _count_group_choices(q: int, m: int, k: int) -> int:
    """Return the number of choices of k nodes, out of q groups of m, that take no group as a whole."""
    if k > q * m:
        return 0
    term, found = comb(q * m, k), 0
    for j in range(min(q, k // m) + 1):
        found += (1 - 2 * (j % 2)) * comb(q, j) * term
        # turn C(n, k) into C(n - m, k - m): m factors each
        n, left = q * m - j * m, k - j * m
        for step in range(min(m, left)):
            term = term * (left - step) // (n - step)
    return found


def compute_ring_probability(N: int, m: int, k: int) -> float:
    """Return the same probability if all nodes form one ring, each keeping its shards on the next m - 1 as well.

    The result is exact. It counts the choices of k nodes of a ring without m in a row. Each is N / (N - k) times a
    choice of N - k runs of fewer than m nodes, one behind each surviving node.
    """
    _check_replicas(N, m)
    if not 0 <= k <= N:
        raise ValueError(f"{k} lost nodes of {N}: between 0 and {N} can be lost")
    left = N - k
    if not left:
        return 0.0
    # the coefficient of x^k in (1 + x + ... + x^(m-1))^left, by inclusion and exclusion
    runs: int = sum(
        (1 - 2 * (j % 2)) * comb(left, j) * comb(k - j * m + left - 1, left - 1) for j in range(min(left, k // m) + 1)
    )
    return N * runs / (left * comb(N, k))


def compute_ring_bound(N: int, m: int, k: int) -> float:
    """Return the lower bound from the paper's union bound for the ring (section 4, Figure 9)."""
    _check_replicas(N, m)
    return max(0.0, 1.0 - N * comb(N - m, k - m) / comb(N, k)) if k >= m else 1.0


def _count_ring_choices(size: int, m: int, k: int) -> list[int]:
    """Return, for j = 0..min(k, size), the number of choices of j nodes without m neighbours among them.

    The nodes are those of a ring of `size` < 2m.

    As size < 2m, only one run of m or more can fit. The count uses `size` places for the run, its length r, a kept
    node at either end, and any choice among the others.
    """
    choices = []
    for j in range(min(k, size) + 1):
        if j < size - 1:
            fatal = sum(size * comb(size - r - 2, j - r) for r in range(m, j + 1))
        else:
            fatal = comb(size, j) if j >= m else 0  # at most one node is left
        choices.append(comb(size, j) - fatal)
    return choices
