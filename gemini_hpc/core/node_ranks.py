"""Node ranks: the logical position of a node in the job, kept across requeues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b


def assign_ranks(
    previous: Mapping[str, int] | None, hosts: Sequence[str], nodes: int | None = None
) -> dict[str, int]:
    """Return the node ranks of the new allocation, from the survivors' map and the host list alone.

    A host in both keeps its rank if that rank still exists (below `nodes`, by default the number of hosts). The
    other hosts fill the gaps in host-list order. Without a previous map, ranks follow the list. A host that finds no
    gap is a spare and has no rank.

    Raises:
        ValueError: A host is listed twice.
    """
    N = len(hosts) if nodes is None else min(nodes, len(hosts))
    kept: dict[int, str] = {}
    for host in hosts:
        rank = -1 if previous is None else previous.get(host, -1)
        if 0 <= rank < N:
            kept.setdefault(rank, host)
    survivors = {host: rank for rank, host in kept.items()}
    gaps = iter([rank for rank in range(N) if rank not in kept])
    ranks: dict[str, int] = {}
    for host in hosts:
        if host in ranks:
            raise ValueError(f"host {host} is in the host list twice")
        ranks[host] = survivors[host] if host in survivors else next(gaps, -1)
    return {host: rank for host, rank in ranks.items() if rank >= 0}


def count_training_nodes(previous: Mapping[str, int] | None, hosts: int, wanted: int) -> int:
    """Return how many node ranks `hosts` hosts have, at least one.

    `wanted` is the number of nodes in the allocation without its spares. A job that had more node ranks keeps them
    while there are hosts, so spares give way first.
    """
    return max(1, min(hosts, max(wanted, len(previous or ()))))


def hash_noderanks(mapping: Mapping[str, int], job: int, restart: int, order: Sequence[int] = ()) -> str:
    """Return the hash that agents compare before one of them publishes the map: 32 hex digits.

    `order` is `placement.Order.ranks`.
    """
    digest = blake2b(digest_size=16)
    digest.update(f"gemini-hpc noderanks 1\n{job}\n{restart}\n".encode())
    for host, rank in sorted(mapping.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{rank} {host}\n".encode())
    if order:
        digest.update(f"order {','.join(map(str, order))}\n".encode())
    return digest.hexdigest()
