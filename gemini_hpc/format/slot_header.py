"""The fixed binary layout of a slot, the same on every holder, so that an agent need not know the content.

    0       header, 4096 bytes (the fields below, zeros after them)
    4096    manifest: the encoded tensor directory, written once per training
    ...     tensor area: starts on a page; tensors in it start at multiples of 64
    ...     small area: starts on a page; opaque state of varying length, at most its capacity

All numbers are unsigned 64-bit and little endian. The header is written last, with the commit (R5). A header may
come from a peer or from torn memory, so `parse_header` verifies everything.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gemini_hpc.core.moments import MODULUS, UNCOUNTED, UNKNOWN, Moment
from gemini_hpc.core.slots import Stamp

MAGIC = b"GEMINI\x00\x01"
HEADER_BYTES = 4096
PAGE_BYTES = 4096
TENSOR_ALIGN_BYTES = 64
MAX_TOTAL_BYTES = 1 << 62  # far above any memory, and sums of two offsets cannot overflow in C

_FIELDS = struct.Struct("<8s15Q")  # releases before 0.3 wrote 0 in the last three


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The offsets and sizes of the areas of one slot, in bytes. `total` is the slot's size, in whole pages."""

    manifest_offset: int
    manifest_bytes: int
    tensor_offset: int
    tensor_bytes: int
    small_offset: int
    small_capacity: int
    total: int

    @classmethod
    def plan(cls, manifest_bytes: int, tensor_bytes: int, small_capacity: int) -> SlotLayout:
        """Return the layout for areas of these sizes.

        Raises:
            ValueError: A size is negative or absurd.
        """
        for name, size in (
            ("manifest", manifest_bytes),
            ("tensor area", tensor_bytes),
            ("small area", small_capacity),
        ):
            if not 0 <= size <= MAX_TOTAL_BYTES // 4:
                raise ValueError(f"a {name} of {size} bytes cannot be laid out")
        tensor_offset = _round_to_page(HEADER_BYTES + manifest_bytes)
        small_offset = _round_to_page(tensor_offset + tensor_bytes)
        total = _round_to_page(small_offset + small_capacity)
        return cls(HEADER_BYTES, manifest_bytes, tensor_offset, tensor_bytes, small_offset, small_capacity, total)


@dataclass(frozen=True, slots=True)
class Header:
    """The first page of a complete slot.

    `small_bytes` of the small area's capacity are in use. `moment` is the moment of the training, as the rank has
    counted it.
    """

    layout: SlotLayout
    small_bytes: int
    stamp: Stamp
    rank: int
    world: int
    moment: Moment = UNCOUNTED

    @property
    def used_bytes(self) -> int:
        """Return the number of leading bytes that count. These are copied, and the digest covers them."""
        return self.layout.small_offset + self.small_bytes


def pack_header(
    layout: SlotLayout, small_bytes: int, stamp: Stamp, rank: int, world: int, moment: Moment = UNCOUNTED
) -> bytes:
    """Return the header page.

    Raises:
        ValueError: `parse_header` would refuse the header.
    """
    header = Header(layout, small_bytes, stamp, rank, world, moment)
    _check_header(header)
    fields = _FIELDS.pack(
        MAGIC,
        layout.manifest_offset,
        layout.manifest_bytes,
        layout.small_offset,
        small_bytes,
        layout.small_capacity,
        layout.tensor_offset,
        layout.tensor_bytes,
        layout.total,
        stamp.epoch,
        stamp.version,
        rank,
        world,
        *moment,
    )
    return fields.ljust(HEADER_BYTES, b"\x00")


def parse_header(page: bytes | bytearray | memoryview, total: int) -> Header:
    """Return the header of a slot of `total` bytes, from its first page.

    Raises:
        ValueError: Anything in the page is wrong.
    """
    if len(page) < HEADER_BYTES:
        raise ValueError(f"slot header: {len(page)} bytes found, {HEADER_BYTES} wanted")
    (
        magic,
        manifest_offset,
        manifest_bytes,
        small_offset,
        small_bytes,
        small_capacity,
        tensor_offset,
        tensor_bytes,
        stated_total,
        epoch,
        version,
        rank,
        world,
        *moment,
    ) = _FIELDS.unpack_from(page)
    if magic != MAGIC:
        raise ValueError(f"slot header: starts with {magic!r}, not with {MAGIC!r}")
    if any(page[_FIELDS.size : HEADER_BYTES]):
        raise ValueError("slot header: the bytes after its fields are not zero")
    if stated_total != total:
        raise ValueError(f"slot header: states a slot of {stated_total} bytes, this one has {total}")
    layout = SlotLayout(
        manifest_offset, manifest_bytes, tensor_offset, tensor_bytes, small_offset, small_capacity, stated_total
    )
    header = Header(layout, small_bytes, Stamp(epoch, version), rank, world, Moment(*moment))
    _check_header(header)
    return header


def read_moment(page: bytes | bytearray | memoryview) -> Moment:
    """Return the moment in a slot's first page; an unknown moment if the page is not of this format."""
    if len(page) < _FIELDS.size or bytes(page[: len(MAGIC)]) != MAGIC:
        return Moment(UNKNOWN)
    moment = Moment(*_FIELDS.unpack_from(page)[-3:])
    return moment if _is_possible(moment) else Moment(UNKNOWN)


def _is_possible(moment: Moment) -> bool:
    return 0 <= moment.mark <= MODULUS and 0 <= min(moment[1:]) <= max(moment[1:]) < 1 << 62


def _check_header(header: Header) -> None:
    layout = header.layout
    if layout != SlotLayout.plan(layout.manifest_bytes, layout.tensor_bytes, layout.small_capacity):
        raise ValueError(f"slot header: its areas do not follow each other as they should: {layout}")
    if not 0 <= header.small_bytes <= layout.small_capacity:
        raise ValueError(f"slot header: {header.small_bytes} bytes of small state, room for {layout.small_capacity}")
    if not 0 <= header.rank < header.world:
        raise ValueError(f"slot header: rank {header.rank} of {header.world} cannot be")
    if not (0 <= header.stamp.epoch < 1 << 64 and 0 <= header.stamp.version < 1 << 64 and header.world < 1 << 64):
        raise ValueError(f"slot header: version {header.stamp} of {header.world} ranks is out of range")
    if not _is_possible(header.moment):
        raise ValueError(f"slot header: {header.moment} cannot be")


def _round_to_page(offset: int) -> int:
    return -(-offset // PAGE_BYTES) * PAGE_BYTES
