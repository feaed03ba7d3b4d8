"""The file of one node in a version: written from slots in memory, read back into slots.

    /rank3                            a rank's shard; attributes: properties of its slot
        header, directory, small      the slot's own areas, bytes
        tensors/NAME                  a tensor, or this rank's box of it (`NAME@256,0`), as a dataset of its type

Every dataset has the plain xxh3_128 of its bytes as an attribute. A shard's digest is in the manifest.
Datasets are contiguous unless compression was asked for. The bytes of contiguous datasets are written and
read at their places in the file, without HDF5 in between.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import xxhash

from gemini_hpc.core.digest import Digest
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import Piece, ShardManifest
from gemini_hpc.format.slot_header import HEADER_BYTES, MAX_TOTAL_BYTES, Header, parse_header
from gemini_hpc.tier import hdf5, publish
from gemini_hpc.tier.direct_io import PART_BYTES
from gemini_hpc.tier.readahead import Ahead
from gemini_hpc.tier.shards import Area, ParsedSlot
from gemini_hpc.tier.writeback import Behind
from gemini_hpc.wire.stored import NodeFile, Stored

_CHUNK_BYTES = 1 << 20  # chunk size of compressed datasets
_SYNC_BYTES = 1 << 30  # limits the last sync, during which the worker reports nothing
_OWN = ("header", "directory", "small")

Paced = Callable[[int], None]


def format_group_path(rank: int) -> str:
    """Return the path of a rank's shard in the file."""
    return f"/rank{rank}"


def format_piece_name(manifest: ShardManifest, piece: Piece) -> str:
    """Return the name of a piece's dataset."""
    row = manifest.rows[piece.row]
    name = hdf5.format_link_name(row.key)
    return name if piece.size == row.shape else f"{name}@{','.join(map(str, piece.offset))}"


def format_tensor_path(rank: int, manifest: ShardManifest, piece: Piece) -> str:
    """Return the path of a piece's dataset in the file."""
    return f"{format_group_path(rank)}/tensors/{format_piece_name(manifest, piece)}"


class Overwritten(ValueError):
    """The error of a shard whose bytes do not match its digest."""


@dataclass(frozen=True)
class _Place:
    """The destination of an area: its dataset, and that dataset's offset in the file.

    An offset of None means that the area is written through HDF5.
    """

    area: Area
    made: Any
    offset: int | None

    def list_parts(self) -> Iterator[tuple[int, hdf5.Box | None]]:
        """Yield each part's size in bytes and its box of the dataset.

        The box is None unless HDF5 writes the part; for HDF5, None means the whole dataset.
        """
        length = self.area.end - self.area.begin
        if self.offset is not None:
            for at in range(0, length, PART_BYTES):
                yield min(PART_BYTES, length - at), None
        elif length:
            yield from _list_boxes(self.made.shape, length)


def write(
    where: str, name: str, shards: Sequence[tuple[ParsedSlot, int, str]], paced: Paced, *, compress: bool = False
) -> NodeFile:
    """Write and sync one node's file of a version.

    The digests in the answer are of the bytes that a reader gets: with zeros between a shard's areas.

    Args:
        where: The version's directory.
        name: The file's name.
        shards: Each shard with the node rank of its home and the digest of its bytes.
        paced: Called with the size in bytes of each written part, and with 0 as a sign of life.
        compress: Store compressed datasets.

    Raises:
        OSError: The file cannot be written.
        ValueError: A shard is invalid.
        Overwritten: A shard's bytes do not match its digest.
    """
    try:
        return _write(where, name, shards, paced, compress=compress, direct=not compress)
    except OSError as error:
        if error.errno != errno.EINVAL or compress:
            raise
    return _write(where, name, shards, paced, compress=False, direct=False)


def _write(
    where: str,
    name: str,
    shards: Sequence[tuple[ParsedSlot, int, str]],
    paced: Paced,
    *,
    compress: bool,
    direct: bool,
) -> NodeFile:
    stored = []
    with publish.replace_file(where, name) as path:
        with hdf5.open_new(path) as file:
            laid_out = [_lay_out(file, shard, paced, compress=compress) for shard, _, _ in shards]
            file.flush()
            digests: list[tuple[Any, str]] = []
            with closing(Behind(path, direct=direct)) as behind:
                disk = _Disk(behind, paced)
                for (shard, home, wanted), places in zip(shards, laid_out, strict=True):
                    header, kept = shard.header, _fill(disk, shard, places, wanted, digests)
                    stored.append(Stored(header.rank, home, header.layout.total, header.used_bytes, kept))
                behind.wait()
            # From here on HDF5 may write to the file.
            for made, own in digests:
                h5py.Dataset(made).attrs["xxh3_128"] = own
                paced(0)
        paced(0)
        size_bytes = os.stat(path).st_size
    return NodeFile(name, size_bytes, tuple(stored))


def _lay_out(file: h5py.File, shard: ParsedSlot, paced: Paced, *, compress: bool) -> list[_Place]:
    """Create the datasets of a shard, in the order of its areas."""
    header, manifest = shard.header, shard.manifest
    group = file.create_group(format_group_path(header.rank))
    group.attrs["slot_bytes"], group.attrs["used_bytes"] = header.layout.total, header.used_bytes
    group.attrs["world"], group.attrs["version"], group.attrs["epoch"] = header.world, *reversed(header.stamp)
    tensors = group.create_group("tensors")
    places = []
    own = iter(_OWN)
    for area in shard.list_areas():
        paced(0)  # shows progress, since there may be very many datasets
        size_bytes = area.end - area.begin
        if area.piece is None:
            made = hdf5.create_dataset(group, next(own), (size_bytes,), "uint8")
            places.append(_Place(area, made, made.get_offset()))
        else:
            row, shape = manifest.rows[area.piece.row], area.piece.size
            chunk = _choose_chunk(shape, size_bytes) if compress else ()
            made = hdf5.create_dataset(
                tensors, format_piece_name(manifest, area.piece), shape, row.dtype, chunk=chunk
            )
            attributes = h5py.Dataset(made).attrs
            attributes["tensor"], attributes["dtype"] = row.key, row.dtype
            attributes["global_shape"] = np.array(row.shape, dtype=np.int64)
            attributes["offset"] = np.array(area.piece.offset, dtype=np.int64)
            places.append(_Place(area, made, None if chunk else made.get_offset()))
    return places


def _fill(
    disk: _Disk, shard: ParsedSlot, places: Sequence[_Place], wanted: str, digests: list[tuple[Any, str]]
) -> str:
    """Write a shard's bytes, digesting them on their way to the disk, and return their digest.

    The returned digest is of the bytes that a reader gets: with zeros between the areas. Raises
    `Overwritten`.
    """
    # `in_memory` includes the bytes between areas; `kept` has zeros there, and is separate once they differ
    in_memory = kept = Digest()
    at = 0
    for spot in places:
        area = spot.area
        between = shard.view[at : area.begin]
        if kept is in_memory and between != bytes(len(between)):
            kept = in_memory.copy()
        hashers = [in_memory] if kept is in_memory else [in_memory, kept]
        in_memory.update(between)
        if kept is not in_memory:
            kept.update(bytes(len(between)))
        own, at = xxhash.xxh3_128(), area.begin
        for size_bytes, box in spot.list_parts():
            data = shard.view[at : at + size_bytes]
            if spot.offset is not None:
                data = disk.put(data, spot.offset + at - area.begin)
            else:
                hdf5.put(spot.made, data, box)
            own.update(data)
            for hasher in hashers:
                hasher.update(data)
            disk.count_written(size_bytes)
            at += size_bytes
        digests.append((spot.made, own.hexdigest()))
    if in_memory.to_hex() != wanted:
        raise Overwritten(f"the copy of rank {shard.header.rank} in memory was overwritten before it was whole")
    return kept.to_hex()


class _Disk:
    """The file's writes beside HDF5: places bytes in the file, and syncs all written bytes now and then."""

    def __init__(self, behind: Behind, paced: Paced) -> None:
        self.put = behind.put
        self._behind, self._paced, self._unsynced_bytes = behind, paced, 0

    def count_written(self, count: int) -> None:
        """Count bytes written here or through HDF5, and sync when many are unsynced."""
        self._paced(count)
        self._unsynced_bytes += count
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._behind.sync()
            self._unsynced_bytes = 0
            self._paced(0)


def _choose_chunk(shape: tuple[int, ...], size_bytes: int) -> tuple[int, ...]:
    """Return a chunk shape of about `_CHUNK_BYTES`, () if the dataset is too small to be compressed.

    The chunk is narrow in the first dimensions and whole in the last ones, so its bytes are contiguous in
    memory.
    """
    if not shape or size_bytes < _CHUNK_BYTES // 16:
        return ()
    chunk, left = [], max(1, size_bytes // _CHUNK_BYTES)
    for length in shape:
        part = max(1, -(-length // left))
        chunk.append(part)
        left = max(1, left // -(-length // part))
    return tuple(chunk)


def _list_boxes(shape: tuple[int, ...], size_bytes: int) -> Iterator[tuple[int, hdf5.Box | None]]:
    """Yield the size in bytes and box of each chunk of a dataset, in their order in memory.

    The worker reports nothing while HDF5 compresses, so a large dataset is passed to HDF5 in parts. A box of
    None means the whole dataset.
    """
    chunk = _choose_chunk(shape, size_bytes)
    if not chunk:
        yield size_bytes, None
        return
    item_bytes = size_bytes // math.prod(shape)
    for offset in itertools.product(*(range(0, n, part) for n, part in zip(shape, chunk, strict=True))):
        size = tuple(min(part, n - at) for n, part, at in zip(shape, chunk, offset, strict=True))
        yield math.prod(size) * item_bytes, (offset, size)


class NodeFileReader:
    """A reader of one node's file.

    Raises OSError if HDF5 cannot open the file, ValueError if its contents are invalid.
    """

    def __init__(self, path: str, ahead: Ahead | None = None) -> None:
        """Open the file; `ahead` holds parts of it that are already read."""
        self._path, self._ahead = path, ahead
        self._file = h5py.File(path, "r")
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        self._file.close()

    def __enter__(self) -> NodeFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, stored: Stored, into: memoryview, paced: Paced = lambda _: None) -> None:
        """Read a rank's shard into `into` as it was in its slot: `stored.used` bytes, zeros between areas.

        `paced` is called with the number of bytes of each part. Raises ValueError if anything differs from
        what was stored.
        """
        group = self._find_group(stored.rank)
        self._read(group, "header", into[:HEADER_BYTES], paced)
        header = parse_header(into[:HEADER_BYTES], stored.bytes)
        layout = header.layout
        if header.used_bytes != stored.used or header.rank != stored.rank:
            raise ValueError(f"{self._path}: the shard of rank {stored.rank} is not the one that was stored")
        end = layout.manifest_offset + layout.manifest_bytes
        self._read(group, "directory", into[layout.manifest_offset : end], paced)
        shard = ParsedSlot.parse(into[: stored.used], stored.bytes)
        shard.clear_gaps()
        tensors = group.get("tensors")
        hasher, hashed = Digest(), 0

        def hash_through(end: int) -> None:
            nonlocal hashed
            for at in range(hashed, end, PART_BYTES):
                hasher.update(into[at : min(end, at + PART_BYTES)])
            hashed = end

        # Digest each part when it has arrived, while the file system reads the next ones.
        for area in shard.list_areas():
            if area.piece is not None:
                name, begin = format_piece_name(shard.manifest, area.piece), area.begin
                for at in self._read_area(tensors, name, into[begin : area.end], paced):
                    hash_through(begin + at)
        self._read(group, "small", into[layout.small_offset : stored.used], paced)
        hash_through(stored.used)
        if hasher.to_hex() != stored.digest:
            raise ValueError(f"{self._path}: the shard of rank {stored.rank} is damaged: its digest differs")

    def read_manifest(self, rank: int) -> ShardManifest:
        """Return a shard's tensor directory."""
        return shard_manifest.unpack(self.read_bytes(f"{format_group_path(rank)}/directory"), MAX_TOTAL_BYTES)

    def read_without_tensors(self, stored: Stored) -> tuple[Header, ShardManifest, bytes]:
        """Return a shard without its tensors: header, tensor directory and small state. Raises ValueError."""
        path = format_group_path(stored.rank)
        header = parse_header(self.read_bytes(f"{path}/header"), stored.bytes)
        if header.used_bytes != stored.used or header.rank != stored.rank:
            raise ValueError(f"{self._path}: the shard of rank {stored.rank} is not the one that was stored")
        return header, self.read_manifest(stored.rank), self.read_bytes(f"{path}/small")

    def read_piece(self, manifest: ShardManifest, piece: Piece) -> bytearray:
        """Return the bytes of a tensor, or of this rank's box of it. Raises ValueError if they are damaged."""
        data = bytearray(manifest.count_bytes(piece))
        path = format_tensor_path(manifest.rank, manifest, piece)
        self._read(self._file, path, memoryview(data), lambda _: None)
        self._check(path, data)
        return data

    def _check(self, path: str, data: bytes | bytearray) -> None:
        if self._find_dataset(self._file, path).attrs.get("xxh3_128") != xxhash.xxh3_128_hexdigest(data):
            raise ValueError(f"{self._path}: {path} is damaged: its digest differs")

    def read_bytes(self, path: str) -> bytes:
        """Return all bytes of a small dataset."""
        found = self._find_dataset(self._file, path)
        data = bytearray(found.size * found.id.get_type().get_size())
        self._read(self._file, path, memoryview(data), lambda _: None)
        self._check(path, data)
        return bytes(data)

    def _find_group(self, rank: int) -> Any:
        found = self._file.get(format_group_path(rank))
        if not isinstance(found, h5py.Group):
            raise ValueError(f"{self._path}: has no shard of rank {rank}")
        return found

    def _find_dataset(self, group: Any, name: str) -> h5py.Dataset:
        found = group.get(name) if isinstance(group, h5py.Group) else None
        if not isinstance(found, h5py.Dataset):
            raise ValueError(f"{self._path}: has no dataset {name}")
        return found

    def _read(self, group: Any, name: str, into: memoryview, paced: Paced) -> None:
        """Read all bytes of a dataset into `into`."""
        for _ in self._read_area(group, name, into, paced):
            pass

    def _read_area(self, group: Any, name: str, into: memoryview, paced: Paced) -> Iterator[int]:
        """Read all bytes of a dataset part by part; yield the number of bytes present after each part."""
        found = self._find_dataset(group, name)
        size_bytes = found.size * found.id.get_type().get_size()
        if size_bytes != len(into):
            raise ValueError(f"{self._path}: {found.name} has {size_bytes} bytes, {len(into)} wanted")
        if not len(into):
            return
        offset, at = found.id.get_offset(), 0
        if offset is None:
            for count, box in _list_boxes(found.shape, size_bytes):
                hdf5.get(found.id, into[at : at + count], box)
                at += count
                paced(count)
                yield at
            return
        while at < len(into):
            part = into[at : at + PART_BYTES]
            count = 0 if self._ahead is None else self._ahead.copy_ahead(part, offset + at)
            count = count or os.preadv(self._fd, [part], offset + at)
            if not count:
                raise ValueError(f"{self._path}: ends within {found.name}")
            at += count
            paced(count)
            yield at
