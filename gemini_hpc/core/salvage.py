"""Who writes what to the tier when a node is missing.

The version is the newest that any agent that is left knows to have been sealed. It is complete wherever a holder is
left: a slot is recycled only for something that was sealed later (R1), of which that holder would have told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def writers(
    held: Mapping[str, Mapping[int, Collection[int]]], noderanks: Mapping[str, int], world: int
) -> tuple[dict[str, set[int]], list[int]]:
    """By host the homes (node ranks) whose shards it writes; the ranks of a training of `world` that nobody can.

    held: by host and home the ranks whose shards it has of that version. The shards of a home go into one file, so
    they have one writer, who has them all: the home itself, if it is there, or else who has the fewest to write.
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
