"""The index of a version: each tensor of the training as one dataset, whatever nodes its parts lie on.

    /tensors/NAME           what all ranks share: parameters, optimizer state; virtual datasets over the nodes' files
    /ranks/3/NAME           what is rank 3's own

Tensors without dimensions are copied: HDF5 shows no others' scalars as its own.
"""

from __future__ import annotations

from typing import Any

import h5py

from gemini_hpc.core.directory import Row
from gemini_hpc.tier import hdf5, nodefile, place
from gemini_hpc.tier.version import INDEX, Manifest


def write(where: str, manifest: Manifest) -> None:
    """Into a version's directory, from the files there. Raises OSError, ValueError."""
    rows: dict[str, Row] = {}
    sources: dict[str, dict[tuple[int, ...], hdf5.Source]] = {}
    values: dict[str, bytes] = {}
    for file in manifest.files:
        with nodefile.Reader(f"{where}/{file.name}") as reader:
            for stored in file.shards:
                found = reader.manifest(stored.rank)
                for number, row in enumerate(found.rows):
                    rows.setdefault(_name(stored.rank, row), row)
                    sources.setdefault(_name(stored.rank, found.rows[number]), {})
                for piece in found.pieces:
                    row = found.rows[piece.row]
                    name = _name(stored.rank, row)
                    path = nodefile.tensor_path(stored.rank, found, piece)
                    if not row.shape:
                        values.setdefault(name, reader.raw(path))
                    else:
                        sources[name].setdefault(piece.offset, (file.name, path, piece.offset, piece.size))
    with place.replaced(where, INDEX) as path, hdf5.created(path) as index:
        index.attrs["job"], index.attrs["set"] = manifest.job, manifest.set
        index.attrs["epoch"], index.attrs["version"] = manifest.stamp
        index.attrs["world"], index.attrs["time"] = manifest.world, manifest.time
        for name, row in rows.items():
            above, _, last = name.rpartition("/")
            _show(index.require_group(above), last, row, list(sources[name].values()), values.get(name))


def _name(rank: int, row: Row) -> str:
    name = hdf5.link_name(row.key)
    return f"tensors/{name}" if row.shared else f"ranks/{rank}/{name}"


def _show(group: h5py.Group, name: str, row: Row, sources: list[hdf5.Source], value: bytes | None) -> None:
    if sources:
        made: Any = hdf5.virtual(group, name, row.shape, row.dtype, sources)
    else:
        made = hdf5.dataset(group, name, row.shape, row.dtype)
        if value is not None:
            hdf5.put(made, value)
    hdf5.label(made, row)
