"""The description of one copy of a shard, as agents exchange it."""

from __future__ import annotations

import msgspec

from gemini_hpc.core.moments import UNKNOWN, Mark
from gemini_hpc.core.numbers import Bytes, Count, SomeBlocks
from gemini_hpc.core.slots import Stamp


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A shard in a parity: the content that must result when it is rebuilt from there. `mark` is as in `Copy`."""

    rank: Count
    home: Count
    bytes: Bytes
    used: Bytes
    digest: str
    mark: Mark = UNKNOWN


class Copy(msgspec.Struct, frozen=True):
    """A complete and verified copy of a shard, or a parity.

    Attributes:
        training: Name of the training.
        rank: Training rank of the shard.
        world: Number of ranks of the training.
        home: Node rank where the training rank lived.
        bytes: Size of the slot.
        used: Bytes of the slot that count.
        stamp: Stamp of the version.
        digest: Digest of the used part (`core.digest`).
        proven: True for a copy made at the shard's home. Otherwise the copy is a replica's, valid only if no other
            contradicts it.
        members: Members of a parity; empty for a copy. A parity is no copy of the rank's shard but lies beside it,
            made of these shards of its stripe.
        blocks: Number of blocks of a parity (`core.parity`).
        room: Distance of these blocks in bytes.
        mark: Mark of the rank's moment at this version (`core.moments`).
    """

    training: str
    rank: Count
    world: Count
    home: Count
    bytes: Bytes
    used: Bytes
    stamp: Stamp
    digest: str
    proven: bool = True
    members: tuple[Member, ...] = ()
    blocks: SomeBlocks = 1
    room: Bytes = 0
    mark: Mark = UNKNOWN
