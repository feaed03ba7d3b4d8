"""The commit record of a slot, which its agent writes last (R5), behind the slot's bytes.

The agent blanks the record before the slot is written, and writes the record after it has verified the digest. The
memory, and the record with it, outlives the agent. A training rank may keep a slot that others fill. The record
tells this rank which version the slot holds when the rank hands the memory to the agent's successor. The record is
not copied: each holder has its own.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

from gemini_hpc.core.slots import Stamp

ROOM_BYTES = 4096  # one page behind the slot's own bytes
_MAGIC = b"GEMCMIT\x01"
_FIELDS = struct.Struct("<8s3Q16s")
_SUM_BYTES = 16
RECORD_BYTES = _FIELDS.size + _SUM_BYTES
BLANK = bytes(RECORD_BYTES)


class Committed(NamedTuple):
    """The complete version in a slot. `digest` is 32 hex digits, over the first `used_bytes` bytes."""

    stamp: Stamp
    used_bytes: int
    digest: str


def pack(committed: Committed) -> bytes:
    """Return the record, `RECORD_BYTES` bytes long.

    The record contains a checksum, because a writer can be killed half way.
    """
    stamp, used, digest = committed
    fields = _FIELDS.pack(_MAGIC, stamp.epoch, stamp.version, used, bytes.fromhex(digest))
    return fields + _compute_sum(fields)


def parse(data: bytes) -> Committed | None:
    """Return the record in `data`; None if there is no record or not a whole one."""
    fields = data[: _FIELDS.size]
    if len(data) < RECORD_BYTES or data[_FIELDS.size : RECORD_BYTES] != _compute_sum(fields):
        return None
    magic, epoch, version, used, digest = _FIELDS.unpack(fields)
    return Committed(Stamp(epoch, version), used, digest.hex()) if magic == _MAGIC else None


def _compute_sum(fields: bytes) -> bytes:
    return blake2b(fields, digest_size=_SUM_BYTES).digest()
