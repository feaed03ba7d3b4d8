"""The commit record of a slot: what its agent writes last (R5), behind the slot's bytes.

The agent blanks it before the slot is written to and writes it when the digest has been found right; the memory, and
the record with it, outlives the agent. So a training rank that keeps a slot which others fill knows what to say of it
when it hands the memory to the agent's successor. Not part of what is copied: each holder has its own.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

from gemini_hpc.core.slots import Stamp

ROOM_BYTES = 4096  # a page behind the slot's own bytes
_MAGIC = b"GEMCMIT\x01"
_FIELDS = struct.Struct("<8s3Q16s")
_SUM_BYTES = 16
RECORD_BYTES = _FIELDS.size + _SUM_BYTES
BLANK = bytes(RECORD_BYTES)


class Committed(NamedTuple):
    """What is complete in a slot. digest: 32 hex digits, of the first `used_bytes` bytes."""

    stamp: Stamp
    used_bytes: int
    digest: str


def pack(committed: Committed) -> bytes:
    """`RECORD_BYTES` bytes; with a sum, since a writer can be killed half way."""
    stamp, used, digest = committed
    fields = _FIELDS.pack(_MAGIC, stamp.epoch, stamp.version, used, bytes.fromhex(digest))
    return fields + _sum(fields)


def parse(data: bytes) -> Committed | None:
    """The record in `data`; None where there is none, or not a whole one."""
    fields = data[: _FIELDS.size]
    if len(data) < RECORD_BYTES or data[_FIELDS.size : RECORD_BYTES] != _sum(fields):
        return None
    magic, epoch, version, used, digest = _FIELDS.unpack(fields)
    return Committed(Stamp(epoch, version), used, digest.hex()) if magic == _MAGIC else None


def _sum(fields: bytes) -> bytes:
    return blake2b(fields, digest_size=_SUM_BYTES).digest()
