"""HDF5 types of captured tensors, and the few low-level calls that h5py's own front does not offer.

Numbers have HDF5's types. bfloat16 is a float of HDF5 with bfloat16's fields, which any HDF5 program converts; floats
of 8 bits and less are stored as bytes. Attribute `dtype` of a dataset always has torch's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import h5py
import numpy as np
from h5py import h5d, h5f, h5fd, h5p, h5s, h5t

from gemini_hpc.format.shard_manifest import Row

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


def create(where: str | BinaryIO) -> h5py.File:
    """A new file, large datasets of which begin on a page, or its bytes in an open one without a buffer, which need
    not have a name. Raises OSError."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_LATEST)
    access.set_alignment(_ALIGN_FROM_BYTES, _ALIGN_BYTES)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    if not isinstance(where, str):
        access.set_fileobj_driver(h5fd.fileobj_driver, where)
        return h5py.File(h5f.create(b"open file", h5f.ACC_TRUNC, fapl=access))
    return h5py.File(h5f.create(where.encode(), h5f.ACC_EXCL, fapl=access))


@contextmanager
def created(path: str) -> Iterator[h5py.File]:
    """A new file, open in this block. Raises OSError, and RuntimeError where HDF5 does: the first thing that fails,
    and not what it says when it is to close a file that it cannot write."""
    file = create(path)
    try:
        yield file
    except BaseException:
        with suppress(Exception):
            file.close()
        raise
    file.close()


def open_together(path: str, comm: Any, info: Any = None) -> h5py.File:
    """A file that all ranks of an mpi4py communicator write to; collective. For an h5py that is built with MPI. info:
    hints of MPI-IO. Raises OSError."""
    from mpi4py import MPI

    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_fapl_mpio(comm, MPI.INFO_NULL if info is None else info)
    return h5py.File(h5f.open(path.encode(), h5f.ACC_RDWR, fapl=access))


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


def label(made: Any, row: Row) -> None:
    """What the tensor of a dataset is called, and its type, as torch has it."""
    attributes = h5py.Dataset(made).attrs
    attributes["tensor"], attributes["dtype"] = row.key, row.dtype


Source = tuple[str, str, tuple[int, ...], tuple[int, ...]]  # file, dataset, offset and size in the whole


def virtual(parent: h5py.Group, name: str, shape: tuple[int, ...], dtype: str, sources: list[Source]) -> Any:
    """A new dataset that shows others as one. shape: of one dimension at least."""
    made = h5p.create(h5p.DATASET_CREATE)
    for file, path, offset, size in sources:
        place = h5s.create_simple(shape)
        place.select_hyperslab(offset, size)
        made.set_virtual(place, file.encode(), path.encode(), h5s.create_simple(size))
    return h5d.create(parent.id, name.encode(), type_of(dtype), h5s.create_simple(shape), dcpl=made)


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size


def put(made: Any, data: bytes | memoryview, box: Box | None = None) -> None:
    """All bytes of a small dataset, or of a box of one, as they are in memory."""
    made.write(*_selected(made, box), np.frombuffer(data, dtype=np.uint8), mtype=made.get_type())


def get(found: Any, into: Any, box: Box | None = None) -> None:
    """The other way: into a writable array of as many bytes."""
    found.read(*_selected(found, box), np.frombuffer(into, dtype=np.uint8), mtype=found.get_type())


def _selected(found: Any, box: Box | None) -> tuple[Any, Any]:
    """What is taken of memory, and of the dataset."""
    if box is None:
        return h5s.ALL, h5s.ALL
    place = found.get_space()
    place.select_hyperslab(*box)
    return h5s.create_simple(box[1]), place


def put_box(found: Any, offset: tuple[int, ...], values: Any, *, together: bool) -> None:
    """An array into its place in a dataset of a file that is open on all ranks. together: collective, by all ranks
    (a rank on which that fails may leave the others waiting, in Open MPI's MPI-IO); values None: nothing from this
    one."""
    how = h5p.create(h5p.DATASET_XFER)
    how.set_dxpl_mpio(h5fd.MPIO_COLLECTIVE if together else h5fd.MPIO_INDEPENDENT)
    place = found.get_space()
    if values is None:
        values = np.zeros(1, dtype=np.uint8)
        place.select_none()
        memory = h5s.create_simple((1,))
        memory.select_none()
    elif values.shape:
        place.select_hyperslab(offset, values.shape)
        memory = h5s.create_simple(values.shape)
    else:
        memory = place
    found.write(memory, place, values, found.get_type(), how)
