"""The plan of a rank: its part of the training state and the layout of its slots, decided from all ranks' state."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import LIFTED
from gemini_hpc.format.slot_header import SlotLayout
from gemini_hpc.train.state import ownership
from gemini_hpc.train.state.capture import Capture
from gemini_hpc.train.state.ownership import Own, TensorEntry
from gemini_hpc.train.state.tree import Leaf, StateTree

LEAST_SMALL_BYTES = 256 << 10


@dataclass(frozen=True)
class Plan:
    """The plan of a rank.

    Attributes:
        capture: The capture of this rank's part.
        packed: The packed manifest.
        layout: The layout of a slot.
        alone: Keys that several ranks have, each with its own content.
        frozen_bytes: Bytes of tensors that are not trained and mostly stay the same.
        own: This rank's part of each tensor that other ranks share, whole or in parts.
        live: Other ranks that have all tensors of this rank's shard.
        since: The last version of an earlier plan.
    """

    capture: Capture
    packed: bytes
    layout: SlotLayout
    alone: frozenset[str]
    frozen_bytes: int
    own: dict[str, Own]
    live: frozenset[int] = frozenset()
    since: int = 0  # the last version of an earlier plan


@dataclass(frozen=True)
class Draft:
    """A rank's state before a plan.

    Attributes:
        leaves: The tensors.
        rows: Their rows in the manifest.
        entries: Their entries for the other ranks.
        small_bytes: Size of the small state without the tensors lifted out of it.
    """

    leaves: list[Leaf]
    rows: list[shard_manifest.TensorRow]
    entries: list[TensorEntry]
    small_bytes: int

    @classmethod
    def from_tree(
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
        """Make a draft of the present state.

        Args:
            tree: The state.
            leaves: Parameters and optimizer tensors.
            odd: Optimizer state that is no tensor, by (optimizer, parameter, name).
            world: Number of ranks.
            lifting: Large tensors of the small state get places of their own.
            unlifted: Names of large tensors that stay in the small state.
            closely: Fingerprints cover whole tensors.

        Raises:
            UnsupportedStateError: A tensor cannot be captured.
            UnknownTypeError: A value of the small state cannot be encoded.
        """
        packed = tree.pack_small(odd, [], world, (lambda name, _: lifting and name not in unlifted))
        every = [*leaves, *tree.build_lifted_leaves(packed.lifted)]
        described = [tree.describe(leaf, world, closely=closely) for leaf in every]
        return cls(every, [row for row, _ in described], [entry for _, entry in described], len(packed.data))

    @property
    def shared(self) -> list[TensorEntry]:
        """Return the entries that other ranks have as well, or have other parts of."""
        return [entry for entry, row in zip(self.entries, self.rows, strict=True) if row.shared]


def choose_small_capacity(first_bytes: int, kept_bytes: int = 0) -> int:
    """Return the room in bytes for a small state of `first_bytes` now.

    Args:
        first_bytes: Present size of the small state.
        kept_bytes: The capacity in the saved run. It is used again where it fits, so that the agent finds memory of
            the same size.
    """
    if kept_bytes >= LEAST_SMALL_BYTES and first_bytes * 5 // 4 <= kept_bytes:
        return kept_bytes
    wanted = max(LEAST_SMALL_BYTES, 2 * first_bytes)
    return 1 << (wanted - 1).bit_length()


def lay_out(
    draft: Draft,
    gathered: Sequence[Sequence[TensorEntry]],
    rank: int,
    mode: ownership.Ownership,
    aliases: Mapping[str, str],
    kept_capacity: int,
    *,
    least_bytes: int = 0,
    apart: frozenset[str] = frozenset(),
) -> Plan:
    """Return this rank's plan: the capture of its part, the manifest and the layout of a slot.

    Args:
        draft: This rank's draft.
        gathered: The shared entries of all ranks, by rank.
        rank: This rank.
        mode: The way shared tensors are dealt out.
        aliases: Other names of tied tensors.
        kept_capacity: The saved run's capacity, see `choose_small_capacity`.
        least_bytes: The least size of the slot.
        apart: Keys that each rank keeps for itself, even if they look equal now.
    """
    rows, entries = list(draft.rows), list(draft.entries)
    alone = ownership.find_unequal(gathered) | apart
    dealt = ownership.deal_blocks([[e for e in part if e.key not in alone] for part in gathered], mode)
    shared = [i for i, row in enumerate(rows) if row.shared and row.key not in alone]
    blocks = [msgspec.structs.replace(b, entry=shared[b.entry]) for b in dealt[rank]]
    for i in sorted(set(range(len(rows))) - set(shared)):  # a local part, captured as this rank's own tensor
        size = entries[i].size
        rows[i] = msgspec.structs.replace(rows[i], shared=False, shape=size)
        entries[i] = msgspec.structs.replace(entries[i], offset=(0,) * len(size))
        blocks.append(ownership.Block(i, entries[i].offset, size))
    blocks = [b for b in blocks if math.prod(b.size)]
    still = (leaf.may_stay and not leaf.tensor.requires_grad for leaf in draft.leaves)
    frozen = {i for i, stays in enumerate(still) if stays}
    # frozen tensors come first, in one range of bytes; lifted ones come last; all others stay in order
    blocks.sort(key=lambda b: (rows[b.entry].optimizer == LIFTED, b.entry not in frozen))
    frozen_bytes = sum(math.prod(b.size) * entries[b.entry].itemsize for b in blocks if b.entry in frozen)
    pieces = shard_manifest.place_boxes(tuple(rows), [(b.entry, b.offset, b.size) for b in blocks])
    manifest = shard_manifest.ShardManifest(rank, len(gathered), tuple(rows), pieces, dict(aliases))
    packed = shard_manifest.pack(manifest)
    tensor_bytes, capacity = manifest.count_tensor_bytes(), choose_small_capacity(draft.small_bytes, kept_capacity)
    layout = SlotLayout.plan(len(packed), tensor_bytes, capacity)
    if layout.total < least_bytes:
        layout = SlotLayout.plan(len(packed), tensor_bytes, capacity + least_bytes - layout.total)
    own = {rows[i].key: Own(entries[i], rows[i].dtype) for i in shared if rows[i].optimizer != LIFTED}
    live = _find_live_ranks(rank, rows, blocks, entries, gathered) if own else frozenset[int]()
    return Plan(Capture(manifest, draft.leaves, entries, blocks), packed, layout, alone, frozen_bytes, own, live)


def _find_live_ranks(
    rank: int,
    rows: Sequence[shard_manifest.TensorRow],
    blocks: Sequence[ownership.Block],
    entries: Sequence[TensorEntry],
    gathered: Sequence[Sequence[TensorEntry]],
) -> frozenset[int]:
    """Return the other ranks that have all of these blocks in tensors of their own.

    Tensors lifted out of the small state are changed by forward passes, so no other rank has them as they were.
    """
    boxes = {(entries[b.entry].key, entries[b.entry].offset, entries[b.entry].size) for b in blocks}
    if not boxes or any(not rows[b.entry].shared or rows[b.entry].optimizer == LIFTED for b in blocks):
        return frozenset()
    found = (r for r, part in enumerate(gathered) if r != rank and len(part) >= len(boxes))
    return frozenset(r for r in found if boxes <= {(e.key, e.offset, e.size) for e in gathered[r]})
