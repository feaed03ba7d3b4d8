"""One copy of a shard, as agents tell each other of it."""

from __future__ import annotations

import msgspec

from gemini_hpc.core.moments import UNKNOWN, Mark
from gemini_hpc.core.numbers import Bytes, Count, SomeBlocks
from gemini_hpc.core.slots import Stamp


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A shard that is in a parity: what has to come out when it is made again from there. mark: as in `Copy`."""

    rank: Count
    home: Count
    bytes: Bytes
    used: Bytes
    digest: str
    mark: Mark = UNKNOWN


class Copy(msgspec.Struct, frozen=True):
    """Complete and verified. home: the node rank where the training rank lived; bytes: the slot's size, used: what of
    it counts; digest (`core.digest`): of the used part. proven: it is
    the one that was made at the shard's home; else a replica's, which no other may contradict. of: this is no copy of
    the rank's shard, but the parity beside it, of these shards of its stripe, in so many blocks,
    `room` bytes apart (`core.parity`). mark: of the rank's moment at this version (`core.moments`)."""

    set: str
    rank: Count
    world: Count
    home: Count
    bytes: Bytes
    used: Bytes
    stamp: Stamp
    digest: str
    proven: bool = True
    of: tuple[Member, ...] = ()
    blocks: SomeBlocks = 1
    room: Bytes = 0
    mark: Mark = UNKNOWN
