"""The index of a version: each tensor of the training as one dataset, regardless of the nodes that hold its parts.

    /tensors/NAME           tensors shared by all ranks (parameters, optimizer state): virtual datasets
                            over the nodes' files
    /ranks/3/NAME           rank 3's own tensors

Tensors without dimensions are copied, because HDF5 cannot show another file's scalars in a virtual dataset.
Buffers are copied too, with rank 0's values, because they are in its small state. A further name of a tied
parameter is a soft link.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h5py

from gemini_hpc.format import small_state
from gemini_hpc.format.shard_manifest import TensorRow
from gemini_hpc.tier import hdf5, nodefile, publish
from gemini_hpc.tier.nodefile import Paced
from gemini_hpc.tier.version import INDEX, VersionManifest


@dataclass
class _Tensor:
    """A tensor in the index: `sources` by their offset, or `value` with the bytes to copy."""

    row: TensorRow
    sources: dict[tuple[int, ...], hdf5.Source] = field(default_factory=dict)
    value: bytes | memoryview = b""


def write(where: str, manifest: VersionManifest, paced: Paced) -> None:
    """Write the index into a version's directory, from the node files there.

    `paced` is called with 0 for each piece to show progress, since there may be very many pieces. Raises
    OSError, ValueError.
    """
    tensors, links = _gather(where, manifest, paced)
    with publish.replace_file(where, INDEX) as path, hdf5.open_new(path) as index:
        index.attrs["job"], index.attrs["training"] = manifest.job, manifest.training
        index.attrs["epoch"], index.attrs["version"] = manifest.stamp
        index.attrs["world"], index.attrs["time"] = manifest.world, manifest.time
        for name, tensor in tensors.items():
            paced(0)
            above, _, last = name.rpartition("/")
            _show(index.require_group(above), last, tensor)
        for name, known in links.items():
            if name not in tensors:
                index[name] = h5py.SoftLink(f"/{known}")


def _gather(where: str, manifest: VersionManifest, paced: Paced) -> tuple[dict[str, _Tensor], dict[str, str]]:
    """Return all tensors by their path in the index, and the target of each further path."""
    tensors: dict[str, _Tensor] = {}
    links: dict[str, str] = {}
    for file in manifest.files:
        with nodefile.NodeFileReader(f"{where}/{file.name}") as reader:
            for stored in file.shards:
                found = reader.read_manifest(stored.rank)
                names = {row.key: _format_path(stored.rank, row) for row in found.rows}
                for row in found.rows:
                    tensors.setdefault(names[row.key], _Tensor(row))
                for piece in found.pieces:
                    paced(0)
                    tensor = tensors[names[found.rows[piece.row].key]]
                    path = nodefile.format_tensor_path(stored.rank, found, piece)
                    if tensor.row.shape:
                        tensor.sources.setdefault(piece.offset, (file.name, path, piece.offset, piece.size))
                    elif not tensor.value:
                        tensor.value = reader.read_bytes(path)
                for alias, known in found.aliases.items():
                    if known in names:
                        links[f"{names[known].rpartition('/')[0]}/{hdf5.format_link_name(alias)}"] = names[known]
                if stored.rank == 0:
                    for row, value in _read_buffers(reader):
                        tensors.setdefault(_format_path(0, row), _Tensor(row, value=value))
    return tensors, links


def _read_buffers(reader: nodefile.NodeFileReader) -> list[tuple[TensorRow, memoryview]]:
    """Return rank 0's buffers; [] if the small state is not a training's, which is then kept as it is."""
    small = reader.read_bytes(f"{nodefile.format_group_path(0)}/small")
    with suppress(ValueError):
        return small_state.list_buffers(small)
    return []


def _format_path(rank: int, row: TensorRow) -> str:
    name = hdf5.format_link_name(row.key)
    return f"tensors/{name}" if row.shared else f"ranks/{rank}/{name}"


def _show(group: h5py.Group, name: str, tensor: _Tensor) -> None:
    row = tensor.row
    if tensor.sources:
        made: Any = hdf5.create_virtual(group, name, row.shape, row.dtype, list(tensor.sources.values()))
    else:
        made = hdf5.create_dataset(group, name, row.shape, row.dtype)
        if tensor.value:
            hdf5.put(made, tensor.value)
    hdf5.label(made, row)
