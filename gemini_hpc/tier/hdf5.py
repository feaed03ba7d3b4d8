"""HDF5 types of captured tensors, and the few low-level calls that h5py's own front does not offer.

Numbers have HDF5's types. bfloat16 is a float of HDF5 with bfloat16's fields, which any HDF5 program converts; floats
of 8 bits and less are stored as bytes. Attribute `dtype` of a dataset always has torch's name.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5f, h5p, h5s, h5t

_ALIGN_FROM_BYTES, _ALIGN_BYTES = 64 << 10, 4096
_PLAIN: dict[str, Any] = {
    "uint8": h5t.STD_U8LE,
    "uint16": h5t.STD_U16LE,
    "uint32": h5t.STD_U32LE,
    "uint64": h5t.STD_U64LE,
    "int8": h5t.STD_I8LE,
    "int16": h5t.STD_I16LE,
    "int32": h5t.STD_I32LE,
    "int64": h5t.STD_I64LE,
    "float16": h5t.IEEE_F16LE,
    "float32": h5t.IEEE_F32LE,
    "float64": h5t.IEEE_F64LE,
}


def type_of(dtype: str) -> Any:
    """The type in files of elements of this dtype (torch's name), of as many bytes."""
    if dtype in _PLAIN:
        return _PLAIN[dtype]
    if dtype == "bfloat16":
        found = h5t.IEEE_F32LE.copy()
        found.set_fields(15, 7, 8, 0, 7)
        found.set_size(2)
        found.set_precision(16)
        found.set_ebias(127)
        return found
    if dtype == "bool":
        return h5t.py_create(np.dtype(bool), logical=True)
    if dtype == "complex32":
        return _complex(h5t.IEEE_F16LE)
    if dtype in ("complex64", "complex128"):
        return h5t.py_create(np.dtype(dtype), logical=True)
    return h5t.STD_U16LE if dtype == "bits16" else h5t.STD_U8LE


def _complex(part: Any) -> Any:
    found = h5t.create(h5t.COMPOUND, 2 * part.get_size())
    found.insert(b"r", 0, part)
    found.insert(b"i", part.get_size(), part)
    return found


def create(path: str) -> h5py.File:
    """A new file, large datasets of which begin on a page. Raises OSError."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_LATEST)
    access.set_alignment(_ALIGN_FROM_BYTES, _ALIGN_BYTES)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    return h5py.File(h5f.create(path.encode(), h5f.ACC_EXCL, fapl=access))


def dataset(parent: h5py.Group, name: str, shape: tuple[int, ...], dtype: str, *, chunk: tuple[int, ...] = ()) -> Any:
    """A new dataset, low-level. Without `chunk` it is contiguous and has its place in the file at once
    (`get_offset`), so that its bytes may be written there without HDF5; with it compressed."""
    made = h5p.create(h5p.DATASET_CREATE)
    made.set_fill_time(h5d.FILL_TIME_NEVER)
    if chunk:
        made.set_chunk(chunk)
        made.set_shuffle()
        made.set_deflate(1)
    else:
        made.set_layout(h5d.CONTIGUOUS)
        made.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    space = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
    return h5d.create(parent.id, name.encode(), type_of(dtype), space, dcpl=made)


def link_name(key: str) -> str:
    """A tensor's name as that of a dataset: no slash in it makes a group."""
    return key.replace("%", "%25").replace("/", "%2F")


Source = tuple[str, str, tuple[int, ...], tuple[int, ...]]  # file, dataset, offset and size in the whole


def virtual(parent: h5py.Group, name: str, shape: tuple[int, ...], dtype: str, sources: list[Source]) -> Any:
    """A new dataset that shows others as one. shape: of one dimension at least."""
    made = h5p.create(h5p.DATASET_CREATE)
    for file, path, offset, size in sources:
        place = h5s.create_simple(shape)
        place.select_hyperslab(offset, size)
        made.set_virtual(place, file.encode(), path.encode(), h5s.create_simple(size))
    return h5d.create(parent.id, name.encode(), type_of(dtype), h5s.create_simple(shape), dcpl=made)


def put(made: Any, data: bytes | memoryview) -> None:
    """All bytes of a small dataset, as they are in memory."""
    made.write(h5s.ALL, h5s.ALL, np.frombuffer(data, dtype=np.uint8), mtype=made.get_type())


def get(found: Any, into: Any) -> None:
    """The other way: into a writable array of as many bytes."""
    found.read(h5s.ALL, h5s.ALL, np.frombuffer(into, dtype=np.uint8), mtype=found.get_type())
