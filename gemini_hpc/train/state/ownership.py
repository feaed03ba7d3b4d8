"""Ownership of the parts of the training state: decided once, equal on every rank, balanced by bytes.

Sharded state stays with the rank that has it. State that several ranks have alike (replicated parameters and their
optimizer state) is cut into blocks of rows and dealt out. So nothing is sent twice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

Ownership = Literal["split", "full"]
_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, size
_BLOCKS_PER_RANK = 32  # a dealt block is at most 1/32 of a rank's fair share: greedy dealing ends within that of it
# Every rank keeps tensors this small, such as an optimizer's count of steps: it would need others' shards otherwise.
_EVERYWHERE_BYTES = 64
_LEAST_BLOCK_BYTES = 4 << 10  # below this, the cost of one more copy outweighs balance


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as one rank has it: the box (offset, size) of the global tensor `key` of `shape`.

    Attributes:
        key: Name of the global tensor.
        shape: Shape of the global tensor.
        offset: Offset of the box.
        size: Size of the box.
        itemsize: Bytes of an element.
        print: Fingerprint of the content, where other ranks with the same box are assumed to have the same content.
        lifted: The tensor was lifted out of the small state.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    itemsize: int
    print: int = 0
    lifted: bool = False

    @property
    def bytes(self) -> int:
        """Return the number of bytes of the box."""
        return math.prod(self.size) * self.itemsize


class Own(NamedTuple):
    """A tensor that a rank shares with others: the part that the rank has, and its type."""

    entry: TensorEntry
    dtype: str


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A box that one rank keeps. `entry` is its index in the rank's list of entries."""

    entry: int
    offset: tuple[int, ...]
    size: tuple[int, ...]


def find_unequal(entries: Sequence[Sequence[TensorEntry]]) -> frozenset[str]:
    """Return the keys that cannot be one global tensor. Each rank has to keep those for itself.

    Shapes or item sizes differ between ranks, or fingerprints of the same box differ, or boxes overlap partly or
    leave gaps.
    """
    seen: dict[str, TensorEntry] = {}
    prints: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    boxes: dict[str, set[_Box]] = {}
    bad = set()
    for rank_entries in entries:
        for entry in rank_entries:
            first = seen.setdefault(entry.key, entry)
            known = prints.setdefault((entry.key, entry.offset, entry.size), entry.print)
            if (first.shape, first.itemsize) != (entry.shape, entry.itemsize) or known != entry.print:
                bad.add(entry.key)
            if entry.bytes:
                boxes.setdefault(entry.key, set()).add((entry.offset, entry.size))
    tiled: dict[
        tuple[tuple[int, ...], frozenset[_Box]], bool
    ] = {}  # layers of a model are cut alike: check each pattern once
    for key, found in boxes.items():
        what = seen[key].shape, frozenset(found)
        if what not in tiled:
            tiled[what] = _is_tiled(*what)
        if not tiled[what]:
            bad.add(key)
    return frozenset(bad)


def find_fingerprinted(entries: Sequence[Sequence[TensorEntry]]) -> frozenset[str]:
    """Return the keys for which several ranks are assumed to have the same content in the same box."""
    return frozenset(entry.key for part in entries for entry in part if entry.print)


def _is_tiled(shape: tuple[int, ...], boxes: frozenset[_Box]) -> bool:
    """Return whether the boxes fill the shape without overlap."""
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    low = np.array([offset for offset, _ in boxes], dtype=np.int64).reshape(len(boxes), -1)
    high = low + np.array([size for _, size in boxes], dtype=np.int64).reshape(len(boxes), -1)
    for i in range(len(boxes) - 1):  # same volume as the whole and pairwise apart
        if ((low[i] < high[i + 1 :]) & (low[i + 1 :] < high[i])).all(axis=1).any():
            return False
    return True


def deal_blocks(entries: Sequence[Sequence[TensorEntry]], mode: Ownership = "split") -> list[list[Block]]:
    """Return for every rank the blocks that it keeps, in the order of its entries.

    The function is pure, so all ranks come to the same result from the same gathered lists.

    Args:
        entries: `entries[r]` is the list of rank r.
        mode: "split" deals shared tensors out; "full" lets every rank keep all of its own.
    """
    if mode == "full":
        return [
            [Block(i, e.offset, e.size) for i, e in enumerate(rank_entries) if e.bytes] for rank_entries in entries
        ]
    index: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, rank_entries in enumerate(entries):
        for i, entry in enumerate(rank_entries):
            if entry.bytes:
                index.setdefault((entry.key, entry.offset, entry.size), []).append((rank, i))
    total = sum(entries[h[0][0]][h[0][1]].bytes for h in index.values())
    block_bytes = max(_LEAST_BLOCK_BYTES, total // (len(entries) * _BLOCKS_PER_RANK))

    kept: list[list[Block]] = [[] for _ in entries]
    load = [0] * len(entries)
    shared: list[tuple[int, tuple[int, ...], tuple[int, ...], dict[int, int]]] = []
    for having in index.values():
        rank, i = having[0]
        entry = entries[rank][i]
        if len(having) == 1 or entry.bytes <= _EVERYWHERE_BYTES:
            for rank, i in having:
                kept[rank].append(Block(i, entry.offset, entry.size))
                load[rank] += entry.bytes
        else:
            holders = dict(having)
            shared.extend((size, offset, box, holders) for size, offset, box in _cut_blocks(entry, block_bytes))
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for size, offset, box, holders in sorted(shared, key=lambda block: -block[0]):
        ranks = tuple(holders)
        heap = heaps.setdefault(ranks, [(0, rank) for rank in ranks])
        while heap[0][0] != load[heap[0][1]]:  # loads of other holder sets have moved on since
            heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        load[rank] += size
        heapq.heapreplace(heap, (load[rank], rank))
        kept[rank].append(Block(holders[rank], offset, box))
    for blocks in kept:
        blocks.sort(key=lambda block: (block.entry, block.offset))
    return kept


def _cut_blocks(entry: TensorEntry, block_bytes: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut an entry into blocks of whole rows, as equal as possible, none much above `block_bytes`.

    Returns:
        (bytes, offset, size) of each block.
    """
    dim = next((d for d, n in enumerate(entry.size) if n > 1), None)
    parts = -(-entry.bytes // block_bytes)
    if dim is None or parts < 2:
        return [(entry.bytes, entry.offset, entry.size)]
    rows = entry.size[dim]
    parts = min(parts, rows)
    row_bytes = entry.bytes // rows
    blocks = []
    for part in range(parts):
        start, stop = rows * part // parts, rows * (part + 1) // parts
        offset = (*entry.offset[:dim], entry.offset[dim] + start, *entry.offset[dim + 1 :])
        size = (*entry.size[:dim], stop - start, *entry.size[dim + 1 :])
        blocks.append(((stop - start) * row_bytes, offset, size))
    return blocks
