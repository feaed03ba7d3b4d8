"""Archives: the arrays of all ranks in one HDF5 file, filled together through parallel HDF5 over MPI-IO.

Everything here is collective and waits forever for a dead rank, so use it in healthy times only. Rank 0 makes the
file with all datasets in their places in its own memory, and copies it to disk. Then all ranks only write values into
it. HDF5 therefore writes nothing of its own when a disk is full. If HDF5 has to and cannot, it ends the program when
it closes the file (1.10.8: a segmentation fault). The ranks compare results after each phase, so that all know of a
failure on any rank.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gemini_hpc import clock
from gemini_hpc.format.shard_manifest import ShardManifest, TensorRow
from gemini_hpc.mpi.arrays import Array, Arrays, Shape
from gemini_hpc.mpi.collectives import MpiRanks
from gemini_hpc.tier.publish import explain_error, publish

Box = tuple[Shape, Shape]  # offset, size


@dataclass
class Dataset:
    """A dataset of the file.

    Attributes:
        boxes: Writer rank of each box; if several ranks have a box, the lowest writes it.
    """

    name: str
    row: TensorRow
    boxes: dict[Box, int] = field(default_factory=dict)


def write(comm: Any, words: MpiRanks, path: str, arrays: Arrays, name: str, version: int, info: Any = None) -> None:
    """Write the archive (collective); see `Checkpointer.archive`.

    Args:
        comm: Communicator of all ranks.
        words: The ranks, for short messages.
        path: Path of the file.
        arrays: Arrays of this rank.
        name: Name of the program, for the file's attributes.
        version: Version of the arrays, for the file's attributes.
        info: Hints for MPI-IO.

    Raises:
        RuntimeError: On all ranks, if h5py on any rank is not built with MPI.
        ValueError: On all ranks, if shapes or types of an array differ between ranks.
        OSError: On all ranks, if a phase fails on any rank.
    """
    _check_all(words, _check_h5py(), RuntimeError)
    datasets = plan([msgspec.msgpack.decode(raw, type=ShardManifest) for raw in words.gather_data(arrays.packed)])
    attributes = {"training": name, "version": version, "world": comm.Get_size(), "time": int(clock.time())}
    directory, last = os.path.split(os.path.abspath(path))
    temporary = f"{directory}/.{last}.tmp"

    def agree(phase: Callable[[], object]) -> None:
        _check_all(words, _try_phase(path, phase), OSError)

    def run_on_first(phase: Callable[[], object]) -> None:
        agree(phase if words.rank == 0 else lambda: None)

    done = False
    try:
        run_on_first(lambda: _make_file(temporary, datasets, attributes))
        # fail before any rank waits for others in MPI-IO: the path may exist on rank 0's node only
        agree(lambda: os.close(os.open(temporary, os.O_RDWR)))
        _fill_file(agree, temporary, datasets, arrays, words.rank, comm, info)
        run_on_first(lambda: publish(temporary, directory, last))
        done = True
    finally:
        if words.rank == 0 and not done:
            with suppress(OSError):
                os.unlink(temporary)


def plan(manifests: Sequence[ShardManifest]) -> list[Dataset]:
    """Return the datasets of a file, in the same order on all ranks.

    Raises:
        ValueError: Ranks share an array whose shape or type differs.
    """
    from gemini_hpc.tier.hdf5 import format_link_name

    found: dict[str, Dataset] = {}
    for manifest in manifests:
        rank_datasets = []
        for row in manifest.rows:
            above = "tensors" if row.shared else f"ranks/{manifest.rank}"
            name = f"{above}/{format_link_name(row.key)}"
            dataset = found.setdefault(name, Dataset(name, row))
            if (row.shape, row.dtype) != (dataset.row.shape, dataset.row.dtype):
                raise ValueError(
                    f"{row.key} is {row.shape} {row.dtype} on rank {manifest.rank}, "
                    f"{dataset.row.shape} {dataset.row.dtype} on one before"
                )
            rank_datasets.append(dataset)
        for piece in manifest.pieces:
            rank_datasets[piece.row].boxes.setdefault((piece.offset, piece.size), manifest.rank)
    return list(found.values())


def _check_h5py() -> str:
    """Return why this rank's h5py cannot write archives, or "" if it can."""
    try:
        import h5py
    except ImportError as error:
        return f"an archive needs h5py, built with MPI: {error}"
    if not h5py.get_config().mpi:
        return f"an archive needs an h5py that is built with MPI; {os.path.dirname(h5py.__file__)} is not"
    return ""


def _make_file(temporary: str, datasets: Sequence[Dataset], attributes: Mapping[str, Any]) -> None:
    """Make the file without its values, replacing the remains of a program that was ended in between."""
    from gemini_hpc.tier import hdf5

    with suppress(FileNotFoundError):
        os.unlink(temporary)
    with open(os.memfd_create("gemini-archive", os.MFD_CLOEXEC), "w+b", buffering=0) as memory:
        with hdf5.create(memory) as file:
            file.attrs.update(attributes)
            for dataset in datasets:
                above, _, last = dataset.name.rpartition("/")
                made = hdf5.create_dataset(file.require_group(above), last, dataset.row.shape, dataset.row.dtype)
                hdf5.label(made, dataset.row)
        to = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _reserve_blocks(to, os.fstat(memory.fileno()).st_size)
            _copy_content(memory.fileno(), to)
        finally:
            os.close(to)


def _reserve_blocks(fd: int, size: int) -> None:
    """Reserve disk blocks for the whole file.

    A full disk is better noticed now than when all ranks write (`hdf5.put_box`). posix_fallocate is no alternative,
    because it writes into each block if a file system lacks the call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    file_system = os.fstatvfs(fd)
    if file_system.f_bavail * file_system.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, size)


def _copy_content(memory: int, fd: int) -> None:
    """Copy the content without the holes that the values fill later."""
    size, at = os.fstat(memory).st_size, 0
    while at < size:
        try:
            at = os.lseek(memory, at, os.SEEK_DATA)
        except OSError:  # ENXIO: a hole up to the end
            return
        os.lseek(fd, at, os.SEEK_SET)
        end = os.lseek(memory, at, os.SEEK_HOLE)
        while at < end:
            at += os.sendfile(fd, memory, at, end - at)


def _fill_file(
    agree: Callable[[Callable[[], object]], None],
    temporary: str,
    datasets: Sequence[Dataset],
    arrays: Arrays,
    rank: int,
    comm: Any,
    info: Any,
) -> None:
    from gemini_hpc.tier import hdf5

    opened: list[Any] = []
    agree(lambda: opened.append(hdf5.open_together(temporary, comm, info)))
    file = opened[0]
    try:
        agree(lambda: _write_values(file, datasets, arrays, rank))
        agree(file.flush)
    finally:
        file.close()


def _write_values(file: Any, datasets: Sequence[Dataset], arrays: Arrays, rank: int) -> None:
    """Write this rank's values.

    A dataset whose boxes are each one contiguous stretch of the file is written by its owners alone. Any other
    dataset is written by all ranks together. This rank then takes part even without values or after a failure,
    because the others wait for it.
    """
    from gemini_hpc.tier import hdf5

    own_values = {(piece.row, piece.offset): values for piece, values in arrays.list_pieces()}
    numbers = {row.key: number for number, row in enumerate(arrays.manifest.rows)}
    failed: Exception | None = None
    for dataset in datasets:
        offsets = [offset for (offset, _), owner in dataset.boxes.items() if owner == rank]
        together = not all(_is_one_stretch(size, dataset.row.shape) for _, size in dataset.boxes)
        if not offsets and not together:
            continue
        values: Array | None = own_values[numbers[dataset.row.key], offsets[0]] if offsets else None
        try:
            hdf5.put_box(file[dataset.name].id, offsets[0] if offsets else (), values, together=together)
        except (OSError, RuntimeError, ValueError) as error:
            failed = failed or error
    if failed:
        raise failed


def _is_one_stretch(size: Shape, shape: Shape) -> bool:
    """Return whether a box has no gaps in its whole array.

    All dimensions after the first one with more than one element must be complete.
    """
    several = next((i for i, n in enumerate(size) if n > 1), len(size))
    return size[several + 1 :] == shape[several + 1 :] or not math.prod(size)


def _try_phase(path: str, work: Callable[[], object]) -> str:
    """Run `work`; return its error in words, or ""."""
    try:
        work()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{path}: {explain_error(error) or type(error).__name__}"
    return ""


def _check_all(words: MpiRanks, problem: str, kind: type[Exception]) -> None:
    """Continue if no rank has a problem, else raise the first rank's problem on all ranks (collective)."""
    found = words.find_first_text(problem and f"rank {words.rank}: {problem}")
    if found:
        raise kind(found)
