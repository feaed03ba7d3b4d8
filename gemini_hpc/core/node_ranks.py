"""Node ranks: a node's logical position in the job, kept across requeues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b


def assign(previous: Mapping[str, int] | None, hosts: Sequence[str]) -> dict[str, int]:
    """Node rank of every host of the new allocation, a pure function of the survivors' map and the host list.

    A host of both keeps its rank if that rank still exists (below `len(hosts)`); the others fill the gaps, in
    host-list order. Without a previous map: list order. Raises ValueError if a host is listed twice.
    """
    N = len(hosts)
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
        ranks[host] = survivors[host] if host in survivors else next(gaps)
    return ranks


def map_hash(mapping: Mapping[str, int], job: int, restart: int) -> str:
    """What the agents compare before one of them publishes the map (SITE rule 17): 32 hex digits."""
    digest = blake2b(digest_size=16)
    digest.update(f"gemini-hpc noderanks 1\n{job}\n{restart}\n".encode())
    for host, rank in sorted(mapping.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{rank} {host}\n".encode())
    return digest.hexdigest()
