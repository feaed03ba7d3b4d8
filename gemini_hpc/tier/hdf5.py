"""HDF5 types of captured tensors, and low-level calls that h5py's high-level interface does not offer.

Numbers have HDF5's own types. bfloat16 is an HDF5 float with bfloat16's bit fields, which any HDF5 program
converts. Floats of 8 bits and less are stored as bytes. A dataset's attribute `dtype` always holds torch's
name of the type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import h5py
import numpy as np
from h5py import h5d, h5f, h5fd, h5p, h5s, h5t

from gemini_hpc.format.shard_manifest import TensorRow

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


def choose_type(dtype: str) -> Any:
    """Return the HDF5 type for elements of this dtype (torch's name), of the same size in bytes."""
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
        return _build_complex(h5t.IEEE_F16LE)
    if dtype in ("complex64", "complex128"):
        return h5t.py_create(np.dtype(dtype), logical=True)
    return h5t.STD_U16LE if dtype == "bits16" else h5t.STD_U8LE


def _build_complex(part: Any) -> Any:
    found = h5t.create(h5t.COMPOUND, 2 * part.get_size())
    found.insert(b"r", 0, part)
    found.insert(b"i", part.get_size(), part)
    return found


def create(where: str | BinaryIO) -> h5py.File:
    """Create an HDF5 file at a path, or inside an open binary file.

    The open file must be unbuffered and need not have a name. Large datasets begin on a page. Raises OSError.
    """
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_LATEST)
    access.set_alignment(_ALIGN_FROM_BYTES, _ALIGN_BYTES)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    if not isinstance(where, str):
        access.set_fileobj_driver(h5fd.fileobj_driver, where)
        return h5py.File(h5f.create(b"open file", h5f.ACC_TRUNC, fapl=access))
    return h5py.File(h5f.create(where.encode(), h5f.ACC_EXCL, fapl=access))


@contextmanager
def open_new(path: str) -> Iterator[h5py.File]:
    """Create a file that is open during the `with` block, and close it afterwards.

    Raises OSError, or RuntimeError where HDF5 raises it. The first failure is raised. Later errors from
    closing a file that cannot be written are suppressed.
    """
    file = create(path)
    try:
        yield file
    except BaseException:
        with suppress(Exception):
            file.close()
        raise
    file.close()


def open_together(path: str, comm: Any, info: Any = None) -> h5py.File:
    """Open a file that all ranks of an mpi4py communicator write to; a collective call.

    It needs an h5py built with MPI. `info` holds MPI-IO hints. Raises OSError.
    """
    from mpi4py import MPI

    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_fapl_mpio(comm, MPI.INFO_NULL if info is None else info)
    return h5py.File(h5f.open(path.encode(), h5f.ACC_RDWR, fapl=access))


def create_dataset(
    parent: h5py.Group, name: str, shape: tuple[int, ...], dtype: str, *, chunk: tuple[int, ...] = ()
) -> Any:
    """Create a dataset and return its low-level object.

    Without `chunk` the dataset is contiguous. Its place in the file is allocated at once (`get_offset`), so
    its bytes may be written there without HDF5. With `chunk` the dataset is chunked and compressed.
    """
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
    return h5d.create(parent.id, name.encode(), choose_type(dtype), space, dcpl=made)


def format_link_name(key: str) -> str:
    """Return a tensor's name as a dataset name, with slashes escaped so that they make no groups."""
    return key.replace("%", "%25").replace("/", "%2F")


def label(made: Any, row: TensorRow) -> None:
    """Set a dataset's attributes for its tensor's name and torch dtype."""
    attributes = h5py.Dataset(made).attrs
    attributes["tensor"], attributes["dtype"] = row.key, row.dtype


# file, dataset, and the source's offset and size in the whole
Source = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def create_virtual(parent: h5py.Group, name: str, shape: tuple[int, ...], dtype: str, sources: list[Source]) -> Any:
    """Create a virtual dataset that presents other datasets as one; `shape` has at least one dimension."""
    made = h5p.create(h5p.DATASET_CREATE)
    for file, path, offset, size in sources:
        place = h5s.create_simple(shape)
        place.select_hyperslab(offset, size)
        made.set_virtual(place, file.encode(), path.encode(), h5s.create_simple(size))
    return h5d.create(parent.id, name.encode(), choose_type(dtype), h5s.create_simple(shape), dcpl=made)


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size


def put(made: Any, data: bytes | memoryview, box: Box | None = None) -> None:
    """Write all bytes of a small dataset, or of one box of a dataset, as they are in memory."""
    made.write(*_select_box(made, box), np.frombuffer(data, dtype=np.uint8), mtype=made.get_type())


def get(found: Any, into: Any, box: Box | None = None) -> None:
    """Read a dataset, or one box of it, into a writable array of equal size in bytes."""
    found.read(*_select_box(found, box), np.frombuffer(into, dtype=np.uint8), mtype=found.get_type())


def _select_box(found: Any, box: Box | None) -> tuple[Any, Any]:
    """Return the selections in memory and in the dataset."""
    if box is None:
        return h5s.ALL, h5s.ALL
    place = found.get_space()
    place.select_hyperslab(*box)
    return h5s.create_simple(box[1]), place


def put_box(found: Any, offset: tuple[int, ...], values: Any, *, together: bool) -> None:
    """Write an array to its place in a dataset of a file that is open on all ranks.

    `together` makes the call collective: all ranks must take part. In Open MPI's MPI-IO a rank on which a
    collective write fails may leave the others waiting. `values` of None means that this rank writes nothing.
    """
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
