"""A rule that assigns the writers of a version to the tier when a node is missing.

The version is the newest that any surviving agent knows to be sealed. The version is complete wherever a holder
survives. A slot is recycled only after a later seal (R1), and that holder would have reported the later seal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def assign_writers(
    held: Mapping[str, Mapping[int, Collection[int]]], noderanks: Mapping[str, int], world: int
) -> tuple[dict[str, set[int]], list[int]]:
    """Return, by host, the homes (node ranks) whose shards it writes, and the ranks that no host can write.

    The shards of a home go into one file, so one writer must hold them all. The home itself writes them if it
    survives. Otherwise the host with the fewest homes to write does.

    Args:
        held: By host and home, the ranks whose shards of that version the host holds.
        noderanks: Node ranks by host.
        world: Number of ranks of the training.
    """
    ranks: dict[int, set[int]] = {}
    for homes in held.values():
        for home, found in homes.items():
            ranks.setdefault(home, set()).update(found)
    chosen: dict[str, set[int]] = {}
    missing = set(range(world))
    able = {home: [host for host in held if set(held[host].get(home, ())) == ranks[home]] for home in ranks}
    own = {home: [host for host in able[home] if noderanks.get(host) == home] for home in ranks}
    for home in sorted(ranks, key=lambda home: (not own[home], home)):
        hosts = own[home] or able[home]
        if hosts:
            writer = min(hosts, key=lambda host: (len(chosen.get(host, ())), noderanks.get(host, 0)))
            chosen.setdefault(writer, set()).add(home)
            missing -= ranks[home]
    return chosen, sorted(missing)
