"""Parity over the nodes of a group: which bytes of a shard are in whose parity (REFT, section 4.1: RAIM5).

A *stripe* has one shard of each node of a group, k of them. Each shard is cut into k - 1 blocks, one for each other
member; a member's parity is the exclusive or of the blocks that the others have for it. So each node keeps its own
shard and 1/(k - 1) of one more, and any one of a stripe's nodes may be lost: block by block its shard is what is left
when the others' blocks are taken out of the parity where they lie together.

The members of a stripe are ordered by rank. Pure; bytes are moved elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gemini_hpc.core.ranges import Range

ALIGN_BYTES = 4096


class Fold(NamedTuple):
    """Bytes `start` to `end` of a rank's shard, or of the parity beside it, belong to those from `at` on."""

    rank: int
    parity: bool
    start: int
    end: int
    at: int


def stripes(homes: Sequence[int], groups: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """For each rank the members of its stripe, in order. homes: the node rank of each rank of a program; groups: of
    node ranks, each node in one. Raises ValueError where one node of a group has more ranks than another."""
    on_node: dict[int, list[int]] = defaultdict(list)
    for rank, home in enumerate(homes):
        on_node[home].append(rank)
    of: dict[int, tuple[int, ...]] = {}
    for group in groups:
        counts = {node: len(on_node.get(node, ())) for node in group}
        if len(set(counts.values())) > 1:
            few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            raise ValueError(
                f"parity needs as many ranks on each node of a group: node rank {few} has {counts[few]}, node rank "
                f"{many} has {counts[many]}"
            )
        for members in zip(*(on_node[node] for node in counts), strict=True):
            of.update(dict.fromkeys(members, tuple(sorted(members))))
    return [of[rank] for rank in range(len(homes))]


def targets(homes: Sequence[int], groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """For each rank the others of its stripe, from the next one on around: the order in which it sends. Raises
    ValueError as `stripes` does."""
    apart = sorted({tuple(sorted(group)) for group in groups})
    found = []
    for rank, stripe in enumerate(stripes(homes, apart)):
        turn = stripe.index(rank)
        found.append([*stripe[turn + 1 :], *stripe[:turn]])
    return found


def block_bytes(used: int, members: int) -> int:
    """Of a shard with `used` bytes: what one parity has of it, at most. Whole pages."""
    others = max(1, members - 1)
    return -(-used // (others * ALIGN_BYTES)) * ALIGN_BYTES


def part(stripe: Sequence[int], rank: int, holder: int, used: int) -> Range:
    """The bytes of a rank's shard that are in the parity of `holder`, another member; start = end where its share is
    empty. Raises ValueError for one that is no other member."""
    index, other = stripe.index(rank), stripe.index(holder)
    if index == other:
        raise ValueError(f"rank {rank} has nothing in its own parity")
    size = block_bytes(used, len(stripe))
    start = min(used, ((other - index - 1) % len(stripe)) * size)
    return start, min(used, start + size)


def parity_bytes(stripe: Sequence[int], holder: int, used: Mapping[int, int]) -> int:
    """Length of a member's parity. used: bytes of each other member's shard."""
    parts = (part(stripe, rank, holder, used[rank]) for rank in stripe if rank != holder)
    return max(end - start for start, end in parts)


def encoding(stripe: Sequence[int], holder: int, used: Mapping[int, int]) -> list[Fold]:
    """What a member's parity is made of, from the first byte on."""
    found = ((rank, *part(stripe, rank, holder, used[rank])) for rank in stripe if rank != holder)
    return [Fold(rank, False, start, end, 0) for rank, start, end in found if end > start]


def decoding(stripe: Sequence[int], lost: int, used: Mapping[int, int]) -> list[Fold]:
    """What a lost shard is made of. used: bytes of each member's shard, also of the lost one."""
    folds = []
    for holder in stripe:
        if holder == lost:
            continue
        at, stop = part(stripe, lost, holder, used[lost])
        size = stop - at
        if not size:
            continue
        folds.append(Fold(holder, True, 0, size, at))
        for rank in stripe:
            if rank not in (lost, holder):
                start, end = part(stripe, rank, holder, used[rank])
                if end > start:
                    folds.append(Fold(rank, False, start, min(end, start + size), at))
    return folds
