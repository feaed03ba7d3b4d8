"""What a scripted rank saves: a slot as a training leaves it, with one tensor, the state of this rank."""

from __future__ import annotations

import msgspec

from gemini_hpc.core.moments import MODULUS, Moment, weigh_collective
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import ShardManifest, TensorRow
from gemini_hpc.format.slot_header import SlotLayout, pack_header, parse_header

_TENSOR_BYTES = 2048
_SMALL_BYTES = 16
SIZE = 12288  # a page each for header, manifest and tensor
LIVE_SIZE = SIZE + 4096  # and for the small state
TENSOR_AT = 8192
_TOTAL_AT = 8 + 8 * 7  # in the header


class Content(msgspec.Struct, array_like=True):
    """The content of the tensor. lineage: of each launch that the state has gone through, its epoch and beginning;
    moment: the iteration that the rank means by the version."""

    rank: int
    version: int
    state: str
    lineage: tuple[tuple[int, int], ...] = ()
    moment: int = 0


def pack(content: Content, epoch: int, world: int, *, live: bool = False) -> bytes:
    """All of the slot. live: with a small state, which belongs to this version and no other."""
    small = _small(content) if live else b""
    size = LIVE_SIZE if live else SIZE
    row = TensorRow("state", "uint8", (_TENSOR_BYTES * world,), True, "cpu")
    pieces = shard_manifest.place_boxes((row,), [(0, (_TENSOR_BYTES * content.rank,), (_TENSOR_BYTES,))])
    manifest = shard_manifest.pack(ShardManifest(content.rank, world, (row,), pieces))
    layout = SlotLayout.plan(len(manifest), _TENSOR_BYTES, len(small))
    assert layout.total == size
    slot = bytearray(size)
    header = pack_header(
        layout, len(small), Stamp(epoch, content.version), content.rank, world, _moment(content, world)
    )
    slot[: len(header)] = header
    slot[layout.manifest_offset : layout.manifest_offset + len(manifest)] = manifest
    tensor = msgspec.json.encode(content).ljust(_TENSOR_BYTES, b"\0")
    slot[layout.tensor_offset : layout.tensor_offset + _TENSOR_BYTES] = tensor
    slot[layout.small_offset : layout.small_offset + len(small)] = small
    return bytes(slot[: layout.small_offset + len(small)])


def _moment(content: Content, world: int) -> Moment:
    """Return the moment of a training with one collective of all ranks in each iteration."""
    mark = content.moment * weigh_collective(range(world), content.rank)
    return Moment(mark % MODULUS, content.moment, 1)


def _small(content: Content) -> bytes:
    return f"{content.rank} {content.version}".encode().ljust(_SMALL_BYTES)


def outline(payload: bytes) -> tuple[int, tuple[int, int, int], Moment]:
    """Bytes of the small state; of directory and tensor, and the most of the small state; the moment."""
    header = parse_header(payload, LIVE_SIZE)
    layout = header.layout
    areas = layout.manifest_bytes, layout.tensor_bytes, layout.small_capacity
    return header.small_bytes, areas, header.moment


def unpack(slot: bytes) -> Content:
    """Inverse of `pack`. Raises ValueError where its parts do not fit together."""
    header = parse_header(slot, int.from_bytes(slot[_TOTAL_AT : _TOTAL_AT + 8], "little"))
    layout = header.layout
    manifest = slot[layout.manifest_offset : layout.manifest_offset + layout.manifest_bytes]
    if shard_manifest.unpack(manifest, layout.tensor_bytes).rank != header.rank:
        raise ValueError(f"a header of rank {header.rank}, a directory of another one")
    tensor = slot[layout.tensor_offset : layout.tensor_offset + _TENSOR_BYTES]
    content = msgspec.json.decode(tensor.rstrip(b"\0"), type=Content)
    if (content.rank, content.version) != (header.rank, header.stamp.version):
        raise ValueError(f"{content} in a slot of rank {header.rank}, {header.stamp}")
    if header.small_bytes and slot[layout.small_offset : header.used_bytes] != _small(content):
        raise ValueError(f"{content} with the small state of another version")
    return content
