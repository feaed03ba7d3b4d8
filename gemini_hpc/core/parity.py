"""Parity over the nodes of a group: the bytes of a shard and the parity that holds them.

The scheme is RAIM5 (REFT, section 4.1), and Reed-Solomon codes if more than one node of a group may be lost.

A *stripe* has one shard of each node of a group, n of them, and `blocks` blocks of parity in each *row*, M for
short. Row r has the parity of the members r, r + 1 ... r + M - 1 (around). Row r also has one block of the shard of
each of the other n - M members. So each shard is cut into n - M blocks, and each node keeps its own shard and M / (n
- M) of another. Any M nodes of a stripe may be lost. Block j of a row's parity is the sum of the row's blocks, each
times the coefficient of its member (`core.gf256`). The coefficients of j = 0 are 1, so with M = 1 all is exclusive
or.

The blocks of a member's parity follow each other, `room` bytes apart: first the block of its own row, j = 0, then
the block of the row before. The members of a stripe are ordered by rank. Pure: bytes are moved elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from gemini_hpc.core import gf256
from gemini_hpc.core.ranges import Range

ALIGN_BYTES = 4096
MAX_MEMBERS = 64  # largest stripe, above the number of nodes that a group can have


class ParityTerm(NamedTuple):
    """A term of a sum: bytes of a shard or of the parity beside it, times a factor.

    Bytes `start` to `end` of the rank's shard or parity, times `by`, are added to the bytes from `at`.
    """

    rank: int
    parity: bool
    start: int
    end: int
    at: int
    by: int = 1


def build_stripes(homes: Sequence[int], groups: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """Return, for each rank, the members of its stripe, in order.

    `homes` has the node rank of each rank of a program. `groups` are groups of node ranks, each node in one.

    Raises:
        ValueError: A node of a group has more ranks than another.
    """
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


def list_targets(homes: Sequence[int], groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return, for each rank, the others of its stripe, from the next one on around: the order in which it sends.

    Raises:
        ValueError: As in `build_stripes`.
    """
    apart = sorted({tuple(sorted(group)) for group in groups})
    found = []
    for rank, stripe in enumerate(build_stripes(homes, apart)):
        turn = stripe.index(rank)
        found.append([*stripe[turn + 1 :], *stripe[:turn]])
    return found


def compute_block_bytes(used: int, members: int, blocks: int = 1) -> int:
    """Return the bytes of a shard with `used` bytes that one block holds at most, in whole pages."""
    cut = max(1, members - blocks)
    return -(-used // (cut * ALIGN_BYTES)) * ALIGN_BYTES


def find_part(stripe: Sequence[int], rank: int, holder: int, used: int, blocks: int = 1) -> Range:
    """Return the bytes of a rank's shard that are in the parity of `holder`, another member.

    start = end if its share is empty.

    Raises:
        ValueError: `holder` is not another member.
    """
    first, last = _find_block_numbers(stripe, rank, holder, blocks)
    size = compute_block_bytes(used, len(stripe), blocks)
    return min(used, first * size), min(used, (last + 1) * size)


def derive_share(
    stripe: Sequence[int], rank: int, holder: int, used: int, blocks: int = 1, room: int = 0
) -> list[ParityTerm]:
    """Return the terms with which a rank's shard enters the parity of `holder`, from the first byte on.

    `room` is the distance in bytes from one block of the parity to the next.
    """
    first, last = _find_block_numbers(stripe, rank, holder, blocks)
    size, index = compute_block_bytes(used, len(stripe), blocks), stripe.index(rank)
    distance = (stripe.index(holder) - index) % len(stripe)
    folds = []
    for number in range(first, last + 1):
        start, end = _find_block(number, size, used)
        if end > start:
            j = distance - 1 - number
            folds.append(ParityTerm(rank, False, start, end, j * room, gf256.compute_coefficient(j, index)))
    return folds


def compute_parity_bytes(
    stripe: Sequence[int], holder: int, used: Mapping[int, int], blocks: int = 1, room: int = 0
) -> int:
    """Return the length of a member's parity. `used` has the bytes of each other member's shard."""
    folds = derive_encoding(stripe, holder, used, blocks, room)
    return max((fold.at + fold.end - fold.start for fold in folds), default=0)


def derive_encoding(
    stripe: Sequence[int],
    holder: int,
    used: Mapping[int, int],
    blocks: int = 1,
    room: int = 0,
) -> list[ParityTerm]:
    """Return the terms that make a member's parity while all other shards are present."""
    others = (rank for rank in stripe if rank != holder)
    return [fold for rank in others for fold in derive_share(stripe, rank, holder, used[rank], blocks, room)]


def derive_encoding_without(
    stripe: Sequence[int],
    holder: int,
    used: Mapping[int, int],
    whole: AbstractSet[int],
    rooms: Mapping[int, int],
    blocks: int,
    room: int,
) -> list[ParityTerm]:
    """Return the same terms when shards are missing: each block of a missing shard is rebuilt from its row.

    `whole` and `rooms` are as in `derive_decoding`.

    Raises:
        ValueError: Too little is present.
    """
    folds: list[ParityTerm] = []
    for fold in derive_encoding(stripe, holder, used, blocks, room):
        if fold.rank in whole:
            folds.append(fold)
            continue
        number = fold.start // compute_block_bytes(used[fold.rank], len(stripe), blocks)
        row = (stripe.index(fold.rank) + 1 + number) % len(stripe)
        beside = {other: room for other, room in rooms.items() if other != holder}
        made = _derive_block(stripe, fold.rank, row, used, whole, beside, blocks, fold.at, fold.end - fold.start)
        folds += [one._replace(by=gf256.multiply(one.by, fold.by)) for one in made]
    return folds


def derive_decoding(
    stripe: Sequence[int],
    lost: int,
    used: Mapping[int, int],
    whole: AbstractSet[int],
    rooms: Mapping[int, int],
    blocks: int = 1,
) -> list[ParityTerm]:
    """Return the terms that make a lost shard.

    Args:
        stripe: Members of the stripe.
        lost: Rank of the lost shard.
        used: Bytes of each member's shard, also of lost ones.
        whole: Members whose shards are present.
        rooms: Distances of the parities that are present, by the member beside whose shard they lie.
        blocks: Blocks of parity in a row.

    Raises:
        ValueError: Too little is present.
    """
    folds: list[ParityTerm] = []
    size = compute_block_bytes(used[lost], len(stripe), blocks)
    for number in range(max(1, len(stripe) - blocks)):
        at, stop = _find_block(number, size, used[lost])
        if stop > at:
            row = (stripe.index(lost) + 1 + number) % len(stripe)
            folds += _derive_block(stripe, lost, row, used, whole, rooms, blocks, at, stop - at)
    return folds


def can_decode(
    stripe: Sequence[int], lost: int, whole: AbstractSet[int], beside: AbstractSet[int], blocks: int = 1
) -> bool:
    """Return whether a lost shard can be rebuilt, of any size.

    `whole` are the members whose shards are present. `beside` are the members beside whose shards there is parity.
    """
    n, at = len(stripe), stripe.index(lost)
    for row in range(at + 1, at + 1 + n - blocks):
        around = [stripe[(row + step) % n] for step in range(n)]
        missing = sum(rank == lost or rank not in whole for rank in around[blocks:])
        if missing > sum(rank != lost and rank in beside for rank in around[:blocks]):
            return False
    return True


def _find_block(number: int, size: int, used: int) -> Range:
    """Return the bytes of a shard's block; start = end if the block is empty."""
    return min(used, number * size), min(used, (number + 1) * size)


def _find_block_numbers(stripe: Sequence[int], rank: int, holder: int, blocks: int) -> tuple[int, int]:
    """Return the first and the last block of a shard that are in the parity of `holder`."""
    index, other = stripe.index(rank), stripe.index(holder)
    if index == other:
        raise ValueError(f"rank {rank} has nothing in its own parity")
    distance = (other - index) % len(stripe)
    return max(0, distance - blocks), min(distance, len(stripe) - blocks) - 1


def _list_row(stripe: Sequence[int], row: int, used: Mapping[int, int], blocks: int) -> Iterator[tuple[int, Range]]:
    """Yield the members that have bytes in the row, and these bytes."""
    for index, rank in enumerate(stripe):
        number = (row - index) % len(stripe) - 1
        if 0 <= number < len(stripe) - blocks:
            size = compute_block_bytes(used[rank], len(stripe), blocks)
            start, end = _find_block(number, size, used[rank])
            if end > start:
                yield rank, (start, end)


def _derive_block(
    stripe: Sequence[int],
    lost: int,
    row: int,
    used: Mapping[int, int],
    whole: AbstractSet[int],
    rooms: Mapping[int, int],
    blocks: int,
    at: int,
    size: int,
) -> list[ParityTerm]:
    """Return the terms that make one block of a lost shard.

    They use as many blocks of parity as the row lacks shards, and the shards' blocks that the row has.
    """
    members = dict(_list_row(stripe, row, used, blocks))
    missing = [rank for rank in members if rank == lost or rank not in whole]
    beside = [(j, stripe[(row + j) % len(stripe)]) for j in range(blocks)]
    chosen = [(j, holder) for j, holder in beside if holder in rooms and holder != lost][: len(missing)]
    if len(chosen) < len(missing):
        raise ValueError(f"of {len(missing)} blocks that are missing in a row only {len(chosen)} can be found")
    columns = {rank: stripe.index(rank) for rank in members}
    matrix = [[gf256.compute_coefficient(j, columns[rank]) for rank in missing] for j, _ in chosen]
    weights = gf256.solve(matrix, missing.index(lost))
    folds = []
    for (j, holder), weight in zip(chosen, weights, strict=True):
        if weight:
            begin = j * rooms[holder]
            folds.append(ParityTerm(holder, True, begin, begin + size, at, weight))
    for rank, (start, end) in members.items():
        if rank in missing:
            continue
        by = 0
        for (j, _), weight in zip(chosen, weights, strict=True):
            by ^= gf256.multiply(weight, gf256.compute_coefficient(j, columns[rank]))
        if by:
            folds.append(ParityTerm(rank, False, start, min(end, start + size), at, by))
    return folds
