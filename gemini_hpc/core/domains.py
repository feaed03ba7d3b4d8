"""Failure domains, which contain nodes that fail together, and an order of placement that keeps them apart.

GEMINI (SOSP '23, section 4) assumes independent node failures. Nodes at one switch or in one rack are not
independent. So no two of them share a group of m, as far as there are other nodes. A domain is a path of names, the
widest first, such as "spine0.leaf1". "" is unknown, and a node with an unknown domain shares nothing with any other.

The nodes, sorted by path, are dealt to the groups in turn. The nodes of a domain are adjacent in that list, at any
level, so every group gets its even share of each domain: no order has fewer pairs. If m does not divide N, the ring
of m + N mod m nodes is chosen first. Each node comes from the domain where it costs least. Both costs are convex in
the number of nodes, so this choice is also optimal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Annotated

import msgspec

from gemini_hpc.core import placement
from gemini_hpc.core.numbers import Count
from gemini_hpc.core.placement import AS_RANKED, PlacementOrder

MAX_LEVELS, MAX_PATH = 8, 255
MAX_SHARED, MAX_NAMED = 16, 32  # groups listed; nodes named in each

Name = Annotated[str, msgspec.Meta(max_length=MAX_PATH)]


class Shared(msgspec.Struct, frozen=True):
    """The nodes of one group that are in one domain."""

    domain: Name
    hosts: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]


class Separation(msgspec.Struct, frozen=True):
    """The degree to which a job's domains are apart.

    Attributes:
        known: Number of nodes with a known domain.
        shared: Groups that share a domain, the first `MAX_SHARED`.
        more: Number of further groups that do.
    """

    known: Count
    shared: Annotated[tuple[Shared, ...], msgspec.Meta(max_length=MAX_SHARED)] = ()
    more: Count = 0


def arrange_nodes(domains: Sequence[str], m: int) -> PlacementOrder:
    """Return the order of placement for nodes of these domains, by node rank.

    The order is that of the ranks if no other order is better, and therefore if no domain is known.

    Raises:
        ValueError: `placement.list_groups` refuses m.
    """
    N = len(domains)
    q = len(placement.list_groups(N, m))
    if m in (1, N) or not any(domains):
        return AS_RANKED
    left = sorted(range(N), key=lambda rank: (not domains[rank], domains[rank].split("."), rank))
    members: list[int] = []
    if N % m:
        members = _choose_ring_members(domains, m + N % m, q - 1) if q > 1 else left
        chosen = set(members)
        left = [rank for rank in left if rank not in chosen]
        q -= 1
    ranks = [rank for g in range(q) for rank in sorted(left[g::q])] + _spread_ring(members, domains)
    found = PlacementOrder(tuple(ranks))
    return found if _compute_cost(found, domains, m) < _compute_cost(AS_RANKED, domains, m) else AS_RANKED


def find_fatal_domains(domains: Sequence[str], m: int, order: PlacementOrder = AS_RANKED) -> set[str]:
    """Return the domains whose loss as a whole takes every holder of some shard."""
    N = len(domains)
    lost: set[str] = set()
    for group in _list_groups(order, N, m):
        size = len(group)
        for start in range(size if size > m else 1):
            held = {domains[group[(start + step) % size]] for step in range(m)}
            if len(held) == 1:
                lost |= held
    return lost - {""}


def measure_separation(
    by_host: Mapping[str, str], noderanks: Mapping[str, int], m: int, order: PlacementOrder
) -> Separation | None:
    """Return the report on a job's placement; None if no domain is known.

    `by_host` has the domains, `noderanks` the node ranks, both by host.
    """
    hosts = {rank: host for host, rank in noderanks.items()}
    domains = [by_host.get(hosts[rank], "") for rank in range(len(hosts))]
    known = sum(map(bool, domains))
    if not known:
        return None
    found: list[Shared] = []
    count = 0
    for group in _list_groups(order, len(domains), m):
        together: dict[str, list[str]] = defaultdict(list)
        for rank in sorted(group):
            together[domains[rank]].append(hosts[rank])
        for domain, names in together.items():
            if domain and len(names) > 1 and m > 1:
                count += 1
                if len(found) < MAX_SHARED:
                    found.append(Shared(domain, tuple(names[:MAX_NAMED])))
    return Separation(known, tuple(found), count - len(found))


def arrange_hosts(by_host: Mapping[str, str], noderanks: Mapping[str, int], m: int) -> PlacementOrder:
    """Return `arrange_nodes` for nodes given by name."""
    if not by_host:
        return AS_RANKED
    hosts = sorted(noderanks, key=lambda host: noderanks[host])
    return arrange_nodes([by_host.get(host, "") for host in hosts], m)


def _list_groups(order: PlacementOrder, N: int, m: int) -> Iterator[list[int]]:
    """Yield the node ranks of each group, in order."""
    for positions in placement.list_groups(N, m):
        yield [order.find_rank(position) for position in positions]


def _list_levels(domain: str) -> list[str]:
    """Return a domain and the domains around it, the narrowest first."""
    parts = domain.split(".")[:MAX_LEVELS] if domain else []
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _choose_ring_members(domains: Sequence[str], size: int, others: int) -> list[int]:
    """Return the node ranks of the last group; `others` groups share the rest.

    Each time, the next node is taken from the domain with the lowest cost. The cost is the number of pairs added
    here, less the pairs removed from the fullest group there. Ties are broken by the wider domains.
    """
    own: dict[str, list[int]] = defaultdict(list)
    alone: list[list[int]] = []
    all_in = Counter[str]()
    for rank, domain in enumerate(domains):
        if domain:
            own[domain].append(rank)
            all_in.update(set(_list_levels(domain)))
        else:
            alone.append([rank])
    in_ring = Counter[str]()

    def compute_cost(domain: str) -> list[int]:
        return [in_ring[name] + 1 - -(-(all_in[name] - in_ring[name]) // others) for name in _list_levels(domain)]

    waiting = [(compute_cost(domain), -ranks[-1], domain, ranks) for domain, ranks in own.items()]
    waiting += [([0], -ranks[-1], "", ranks) for ranks in alone]
    heapify(waiting)
    members: list[int] = []
    while len(members) < size:
        known, last, domain, ranks = heappop(waiting)
        now = compute_cost(domain) if domain else known
        if now > known:  # costs only grow
            heappush(waiting, (now, last, domain, ranks))
            continue
        members.append(ranks.pop())
        in_ring.update(set(_list_levels(domain)))
        if ranks:
            heappush(waiting, (compute_cost(domain), -ranks[-1], domain, ranks))
    return members


def _spread_ring(members: Sequence[int], domains: Sequence[str]) -> list[int]:
    """Return a ring in which the nodes of the most frequent domain are as far apart as possible."""
    if not members:
        return []
    most, count = Counter(domains[rank] or str(rank) for rank in members).most_common(1)[0]
    if count == 1:
        return sorted(members)
    inside = sorted(rank for rank in members if domains[rank] == most)
    outside = sorted((rank for rank in members if domains[rank] != most), key=lambda rank: (domains[rank], rank))
    placed = [
        ((i + 0.5) / len(part), turn, rank)
        for turn, part in enumerate((inside, outside))
        for i, rank in enumerate(part)
    ]
    return [rank for _, _, rank in sorted(placed)]


def _compute_cost(order: PlacementOrder, domains: Sequence[str], m: int) -> tuple[int, ...]:
    """Return the cost of an order, for comparison.

    The cost counts pairs of nodes of one domain in one group, then fatal domains, then such pairs for each wider
    level.
    """
    pairs = [0] * MAX_LEVELS
    for group in _list_groups(order, len(domains), m):
        counts: dict[tuple[int, str], int] = defaultdict(int)
        for rank in group:
            for level, name in enumerate(_list_levels(domains[rank])):
                pairs[level] += counts[level, name]
                counts[level, name] += 1
    return (pairs[0], len(find_fatal_domains(domains, m, order)), *pairs[1:])
