"""Who keeps what of the training state, and where it lies in a slot: decided from what all ranks have."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import LIFTED
from gemini_hpc.format.slot_header import Layout
from gemini_hpc.train.state import ownership
from gemini_hpc.train.state.capture import Capture
from gemini_hpc.train.state.ownership import Entry, Own
from gemini_hpc.train.state.tree import Leaf, StateTree

LEAST_SMALL_BYTES = 256 << 10


@dataclass(frozen=True)
class Plan:
    """Of one rank. packed: the manifest; alone: keys that are several ranks', each with a content of its own;
    frozen_bytes: of what is not trained, and mostly stays; own: what this rank has of tensors that others have as
    well, or the rest of; live: other ranks that have all tensors of this rank's shard."""

    capture: Capture
    packed: bytes
    layout: Layout
    alone: frozenset[str]
    frozen_bytes: int
    own: dict[str, Own]
    live: frozenset[int] = frozenset()
    since: int = 0  # the last version of an earlier plan


@dataclass(frozen=True)
class Draft:
    """What one rank has, before a plan. small_bytes: of the small state without what is lifted out of it."""

    leaves: list[Leaf]
    rows: list[shard_manifest.Row]
    entries: list[Entry]
    small_bytes: int

    @classmethod
    def of(
        cls,
        tree: StateTree,
        leaves: Sequence[Leaf],
        odd: Mapping[tuple[int, str, str], Any],
        world: int,
        *,
        lifting: bool,
        unlifted: Collection[str] = (),
        closely: bool = False,
    ) -> Draft:
        """lifting: large tensors get places of their own, but those `unlifted`; closely: fingerprints are of whole
        tensors. Raises UnsupportedStateError, UnknownTypeError."""
        packed = tree.pack_small(odd, [], world, (lambda name, _: lifting and name not in unlifted))
        every = [*leaves, *tree.lifted_leaves(packed.lifted)]
        described = [tree.describe(leaf, world, closely=closely) for leaf in every]
        return cls(every, [row for row, _ in described], [entry for _, entry in described], len(packed.data))

    @property
    def shared(self) -> list[Entry]:
        """What other ranks have as well, or the rest of."""
        return [entry for entry, row in zip(self.entries, self.rows, strict=True) if row.shared]


def small_capacity(first_bytes: int, kept_bytes: int = 0) -> int:
    """Room for small state that is `first_bytes` now. kept_bytes: the capacity that the saved run had: used again
    where it fits, so that the agent finds memory of the same size."""
    if kept_bytes >= LEAST_SMALL_BYTES and first_bytes * 5 // 4 <= kept_bytes:
        return kept_bytes
    wanted = max(LEAST_SMALL_BYTES, 2 * first_bytes)
    return 1 << (wanted - 1).bit_length()


def lay_out(
    draft: Draft,
    gathered: Sequence[Sequence[Entry]],
    rank: int,
    mode: ownership.Ownership,
    aliases: Mapping[str, str],
    kept_capacity: int,
    *,
    least_bytes: int = 0,
    apart: frozenset[str] = frozenset(),
) -> Plan:
    """This rank's part of what all ranks have: the capture of it, its manifest, the layout of a slot.

    gathered: the shared entries of all ranks, by rank; kept_capacity: see `small_capacity`; least_bytes: of the slot;
    apart: keys that each rank keeps for itself, whatever they look like now.
    """
    rows, entries = list(draft.rows), list(draft.entries)
    alone = ownership.unequal(gathered) | apart
    dealt = ownership.deal([[e for e in part if e.key not in alone] for part in gathered], mode)
    shared = [i for i, row in enumerate(rows) if row.shared and row.key not in alone]
    blocks = [msgspec.structs.replace(b, entry=shared[b.entry]) for b in dealt[rank]]
    for i in sorted(set(range(len(rows))) - set(shared)):  # a local part that stands for itself
        size = entries[i].size
        rows[i] = msgspec.structs.replace(rows[i], shared=False, shape=size)
        entries[i] = msgspec.structs.replace(entries[i], offset=(0,) * len(size))
        blocks.append(ownership.Block(i, entries[i].offset, size))
    blocks = [b for b in blocks if math.prod(b.size)]
    still = (leaf.may_stay and not leaf.tensor.requires_grad for leaf in draft.leaves)
    frozen = {i for i, stays in enumerate(still) if stays}
    # what stays as it is, is one range of bytes; what is lifted comes last; all else stays in order
    blocks.sort(key=lambda b: (rows[b.entry].optimizer == LIFTED, b.entry not in frozen))
    frozen_bytes = sum(math.prod(b.size) * entries[b.entry].itemsize for b in blocks if b.entry in frozen)
    pieces = shard_manifest.place(tuple(rows), [(b.entry, b.offset, b.size) for b in blocks])
    manifest = shard_manifest.Manifest(rank, len(gathered), tuple(rows), pieces, dict(aliases))
    packed = shard_manifest.pack(manifest)
    tensor_bytes, capacity = manifest.tensor_bytes(), small_capacity(draft.small_bytes, kept_capacity)
    layout = Layout.plan(len(packed), tensor_bytes, capacity)
    if layout.total < least_bytes:
        layout = Layout.plan(len(packed), tensor_bytes, capacity + least_bytes - layout.total)
    own = {rows[i].key: Own(entries[i], rows[i].dtype) for i in shared if rows[i].optimizer != LIFTED}
    live = _live(rank, rows, blocks, entries, gathered) if own else frozenset[int]()
    return Plan(Capture(manifest, draft.leaves, entries, blocks), packed, layout, alone, frozen_bytes, own, live)


def _live(
    rank: int,
    rows: Sequence[shard_manifest.Row],
    blocks: Sequence[ownership.Block],
    entries: Sequence[Entry],
    gathered: Sequence[Sequence[Entry]],
) -> frozenset[int]:
    """Other ranks that have all of these blocks in tensors of their own. What is lifted out of the small state is
    changed by forward passes: nobody has it as it was."""
    boxes = {(entries[b.entry].key, entries[b.entry].offset, entries[b.entry].size) for b in blocks}
    if not boxes or any(not rows[b.entry].shared or rows[b.entry].optimizer == LIFTED for b in blocks):
        return frozenset()
    found = (r for r, part in enumerate(gathered) if r != rank and len(part) >= len(boxes))
    return frozenset(r for r in found if boxes <= {(e.key, e.offset, e.size) for e in gathered[r]})
