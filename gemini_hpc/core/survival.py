"""The node losses that a job would survive now, counted from existing copies instead of the plan. Pure.

A shard is represented by the set of nodes that hold a good copy. A loss is survived if every shard keeps a holder.
All counts are exact for k <= 3, for any number of nodes. Losses that hit a single-holder shard are counted by
binomials. Losses that hit a pair are counted by the pairs' graph, and those that hit a triple one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from math import comb

MAX_K = 3


@dataclass(frozen=True, slots=True)
class Survival:
    """The share of node losses that a job survives.

    Attributes:
        probability: At index k-1, the share of the k-node losses that are survived.
        fatal: The smallest losses that are not survived.
        lost_already: True if some shard has no holder now.
    """

    probability: tuple[float, ...]
    fatal: tuple[tuple[str, ...], ...]
    lost_already: bool


def compute_survival(nodes: Iterable[str], shards: Iterable[frozenset[str]]) -> Survival:
    """Return the exact shares for k = 1..3 (fewer on smaller jobs)."""
    names = sorted(set(nodes))
    ks = range(1, min(MAX_K, len(names)) + 1)
    trainings = set(shards)
    if frozenset() in trainings:
        return Survival(tuple(0.0 for _ in ks), (), True)
    fatal = sorted({tuple(sorted(s)) for s in _find_minimal(trainings)}, key=lambda t: (len(t), t))
    singles = {f[0] for f in fatal if len(f) == 1}
    edges = [frozenset(f) for f in fatal if len(f) == 2]
    triples = [frozenset(f) for f in fatal if len(f) == 3]
    safe = len(names) - len(singles)
    shares = []
    for k in ks:
        good = comb(safe, k)
        if k == 2:
            good -= len(edges)
        elif k == 3:
            good -= _count_triples(edges, safe) + len(triples)
        shares.append(good / comb(len(names), k))
    return Survival(tuple(shares), tuple(f for f in fatal if len(f) <= MAX_K), False)


def _find_minimal(trainings: set[frozenset[str]]) -> list[frozenset[str]]:
    """Return the sets of at most three nodes that contain no other of these sets."""
    small = sorted((s for s in trainings if len(s) <= MAX_K), key=len)
    kept: set[frozenset[str]] = set()
    for s in small:
        parts = (frozenset(c) for n in range(1, len(s)) for c in combinations(s, n))
        if not any(part in kept for part in parts):
            kept.add(s)
    return list(kept)


def _count_triples(edges: list[frozenset[str]], nodes: int) -> int:
    """Return the number of triples of `nodes` nodes that contain an edge.

    The plain count would include paths twice and triangles three times.
    """
    near: dict[str, set[str]] = {}
    for edge in edges:
        a, b = edge
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    paths = sum(comb(len(n), 2) for n in near.values())
    triangles = sum(len(near[a] & near[b]) for a, b in map(tuple, edges)) // 3
    return len(edges) * (nodes - 2) - paths + triangles
