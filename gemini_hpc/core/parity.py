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
from dataclasses import dataclass
from typing import NamedTuple

from gemini_hpc.core import gf256
from gemini_hpc.core.ranges import Range

ALIGN_BYTES = 4096
MAX_MEMBERS = 64  # largest stripe, above the number of nodes that a group can have


class ParityTerm(NamedTuple):
    """A term of a sum: bytes of a shard or of the parity beside it, times a factor.

    Bytes `start` to `end` of the rank's shard or parity, times `factor`, are added to the bytes from `offset`.
    """

    rank: int
    parity: bool
    start: int
    end: int
    offset: int
    factor: int = 1


def build_stripes(homes: Sequence[int], groups: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """Return, for each rank, the members of its stripe, in order.

    `homes` has the node rank of each rank of a program. `groups` are groups of node ranks, each node in one.

    Raises:
        ValueError: A node of a group has more ranks than another.
    """
    on_node: dict[int, list[int]] = defaultdict(list)
    for rank, home in enumerate(homes):
        on_node[home].append(rank)
    stripes: dict[int, tuple[int, ...]] = {}
    for group in groups:
        counts = {node: len(on_node.get(node, ())) for node in group}
        if len(set(counts.values())) > 1:
            few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            raise ValueError(
                f"parity needs as many ranks on each node of a group: node rank {few} has {counts[few]}, node rank "
                f"{many} has {counts[many]}"
            )
        for members in zip(*(on_node[node] for node in counts), strict=True):
            stripes.update(dict.fromkeys(members, tuple(sorted(members))))
    return [stripes[rank] for rank in range(len(homes))]


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


@dataclass(frozen=True, slots=True)
class Stripe:
    """The members of a stripe, ordered by rank, and the blocks of parity in each row.

    Of the methods' arguments, `used` has the bytes of each member's shard. `room` is the distance in bytes from one
    block of a parity to the next. `whole` are the members whose shards are present. `rooms` has the distances of the
    parities that are present, by the member beside whose shard they lie.
    """

    ranks: tuple[int, ...]
    blocks: int = 1

    def compute_block_bytes(self, used: int) -> int:
        """Return the bytes of a shard with `used` bytes that one block holds at most, in whole pages."""
        return compute_block_bytes(used, len(self.ranks), self.blocks)

    def find_part(self, rank: int, holder: int, used: int) -> Range:
        """Return the bytes of a rank's shard that are in the parity of `holder`, another member.

        start = end if its share is empty.

        Raises:
            ValueError: `holder` is not another member.
        """
        numbers, size = self._list_numbers(rank, holder), self.compute_block_bytes(used)
        return min(used, numbers.start * size), min(used, numbers.stop * size)

    def derive_share(self, rank: int, holder: int, used: int, room: int = 0) -> list[ParityTerm]:
        """Return the terms with which a rank's shard enters the parity of `holder`, from the first byte on."""
        index = self.ranks.index(rank)
        distance = (self.ranks.index(holder) - index) % len(self.ranks)
        folds = []
        for number in self._list_numbers(rank, holder):
            start, end = self._find_block(number, used)
            if end > start:
                j = distance - 1 - number
                folds.append(ParityTerm(rank, False, start, end, j * room, gf256.compute_coefficient(j, index)))
        return folds

    def compute_parity_bytes(self, holder: int, used: Mapping[int, int], room: int = 0) -> int:
        """Return the length of a member's parity. `used` need not have its own shard's bytes."""
        folds = self.derive_encoding(holder, used, room)
        return max((fold.offset + fold.end - fold.start for fold in folds), default=0)

    def derive_encoding(self, holder: int, used: Mapping[int, int], room: int = 0) -> list[ParityTerm]:
        """Return the terms that make a member's parity while all other shards are present."""
        others = (rank for rank in self.ranks if rank != holder)
        return [fold for rank in others for fold in self.derive_share(rank, holder, used[rank], room)]

    def derive_encoding_without(
        self, holder: int, used: Mapping[int, int], whole: AbstractSet[int], rooms: Mapping[int, int], room: int
    ) -> list[ParityTerm]:
        """Return the same terms when shards are missing: each block of a missing shard is rebuilt from its row.

        Raises:
            ValueError: Too little is present.
        """
        folds: list[ParityTerm] = []
        beside = {other: room for other, room in rooms.items() if other != holder}
        for fold in self.derive_encoding(holder, used, room):
            if fold.rank in whole:
                folds.append(fold)
                continue
            number = fold.start // self.compute_block_bytes(used[fold.rank])
            made = self._derive_block(fold.rank, number, fold.offset, used, whole, beside)
            folds += [one._replace(factor=gf256.multiply(one.factor, fold.factor)) for one in made]
        return folds

    def derive_decoding(
        self, lost: int, used: Mapping[int, int], whole: AbstractSet[int], rooms: Mapping[int, int]
    ) -> list[ParityTerm]:
        """Return the terms that make the shard of rank `lost`. `used` also has the bytes of lost shards.

        Raises:
            ValueError: Too little is present.
        """
        folds: list[ParityTerm] = []
        for number in range(max(1, len(self.ranks) - self.blocks)):
            at, stop = self._find_block(number, used[lost])
            if stop > at:
                folds += self._derive_block(lost, number, at, used, whole, rooms)
        return folds

    def can_decode(self, lost: int, whole: AbstractSet[int], beside: AbstractSet[int]) -> bool:
        """Return whether a lost shard can be rebuilt, of any size.

        `beside` are the members beside whose shards there is parity.
        """
        n, at = len(self.ranks), self.ranks.index(lost)
        for row in range(at + 1, at + 1 + n - self.blocks):
            around = [self.ranks[(row + step) % n] for step in range(n)]
            missing = sum(rank == lost or rank not in whole for rank in around[self.blocks :])
            if missing > sum(rank != lost and rank in beside for rank in around[: self.blocks]):
                return False
        return True

    def _find_block(self, number: int, used: int) -> Range:
        """Return the bytes of a shard's block; start = end if the block is empty."""
        size = self.compute_block_bytes(used)
        return min(used, number * size), min(used, (number + 1) * size)

    def _list_numbers(self, rank: int, holder: int) -> range:
        """Return the numbers of the blocks of a shard that are in the parity of `holder`."""
        distance = (self.ranks.index(holder) - self.ranks.index(rank)) % len(self.ranks)
        if not distance:
            raise ValueError(f"rank {rank} has nothing in its own parity")
        return range(max(0, distance - self.blocks), min(distance, len(self.ranks) - self.blocks))

    def _list_row(self, row: int, used: Mapping[int, int]) -> Iterator[tuple[int, Range]]:
        """Yield the members that have bytes in the row, and these bytes."""
        for index, rank in enumerate(self.ranks):
            number = (row - index) % len(self.ranks) - 1
            if 0 <= number < len(self.ranks) - self.blocks:
                start, end = self._find_block(number, used[rank])
                if end > start:
                    yield rank, (start, end)

    def _derive_block(
        self,
        lost: int,
        number: int,
        offset: int,
        used: Mapping[int, int],
        whole: AbstractSet[int],
        rooms: Mapping[int, int],
    ) -> list[ParityTerm]:
        """Return the terms that make one block of a lost shard, to be added to the bytes from `offset`.

        They use as many blocks of parity as the row lacks shards, and the shards' blocks that the row has.
        """
        row = (self.ranks.index(lost) + 1 + number) % len(self.ranks)
        members = dict(self._list_row(row, used))
        first, stop = self._find_block(number, used[lost])
        size = stop - first
        missing = [rank for rank in members if rank == lost or rank not in whole]
        beside = [(j, self.ranks[(row + j) % len(self.ranks)]) for j in range(self.blocks)]
        chosen = [(j, holder) for j, holder in beside if holder in rooms and holder != lost][: len(missing)]
        if len(chosen) < len(missing):
            raise ValueError(f"of {len(missing)} blocks that are missing in a row only {len(chosen)} can be found")
        columns = {rank: self.ranks.index(rank) for rank in members}
        matrix = [[gf256.compute_coefficient(j, columns[rank]) for rank in missing] for j, _ in chosen]
        weights = gf256.solve(matrix, missing.index(lost))
        folds = []
        for (j, holder), weight in zip(chosen, weights, strict=True):
            if weight:
                begin = j * rooms[holder]
                folds.append(ParityTerm(holder, True, begin, begin + size, offset, weight))
        for rank, (start, end) in members.items():
            if rank in missing:
                continue
            factor = 0
            for (j, _), weight in zip(chosen, weights, strict=True):
                factor ^= gf256.multiply(weight, gf256.compute_coefficient(j, columns[rank]))
            if factor:
                folds.append(ParityTerm(rank, False, start, min(end, start + size), offset, factor))
        return folds
