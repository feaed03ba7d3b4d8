"""A version of the tier in one process: its whole tensors by name, and its small state. Needs torch."""

from __future__ import annotations

import argparse
import datetime
import io
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gemini_hpc.format.shard_manifest import LIFTED, TensorRow
from gemini_hpc.tier import publish, version
from gemini_hpc.train.state import groups, lifted
from gemini_hpc.train.state.restore import SavedShard
from gemini_hpc.train.state.tensors import find_dtype, select_box
from gemini_hpc.wire.stored import Stored

if TYPE_CHECKING:
    from gemini_hpc.tier.nodefile import NodeFileReader

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, size


@dataclass
class Whole:
    """A version with whole tensors.

    Attributes:
        tensors: Tensors by key. A single rank's own tensor has a key such as `rank3:KEY`.
        rows: The manifest's row of each tensor.
        aliases: Other names of tied tensors.
        small: The small state of rank 0. An MPI program has none.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, TensorRow] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)


@contextmanager
def open_shards(where: str, manifest: version.VersionManifest) -> Iterator[list[SavedShard]]:
    """Open all shards of a version and yield them by rank.

    Only directories and small states are read now. Tensors are read on demand, each checked against its digest.

    Raises:
        OSError: A file cannot be read, now or when a tensor is read.
        ValueError: A file is missing or damaged, now or when a tensor is read.
    """
    with ExitStack() as files:
        shards = []
        for file in manifest.files:
            reader = files.enter_context(_open_file(f"{where}/{file.name}"))
            shards += [_read_shard(reader, stored) for stored in file.shards]
        yield sorted(shards, key=lambda saved: saved.manifest.rank)


def _open_file(path: str) -> NodeFileReader:
    from gemini_hpc.tier.nodefile import NodeFileReader

    try:
        return NodeFileReader(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, and this version needs it: choose another version") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {publish.explain_error(error)}") from None


def _read_shard(reader: NodeFileReader, stored: Stored) -> SavedShard:
    header, manifest, small = reader.read_without_tensors(stored)
    return SavedShard(
        header, manifest, lambda piece: torch.frombuffer(reader.read_piece(manifest, piece), dtype=torch.uint8), small
    )


def read_whole(where: str, manifest: version.VersionManifest) -> Whole:
    """Read the version from its directory `where`.

    Raises:
        OSError: A file cannot be read.
        ValueError: A tensor is damaged or not whole.
    """
    with open_shards(where, manifest) as shards:
        return _join_shards(shards)


def _join_shards(shards: Iterable[SavedShard]) -> Whole:
    whole, have = Whole(), dict[str, set[Box]]()
    for saved in shards:
        small = saved.decode_small(enums=False) if saved.small_raw else {}
        if saved.manifest.rank == 0 and small:
            whole.small, whole.aliases = small, dict(saved.manifest.aliases)
        for fields, tensor in small.get("late", ()):
            _add_late(whole, saved, TensorRow(*fields), tensor)
        for row in saved.manifest.rows:
            key = saved.build_key(row)
            first = whole.rows.setdefault(key, row)
            if key not in whole.tensors:
                whole.tensors[key] = torch.zeros(row.shape, dtype=find_dtype(row.dtype), device="cpu")
                have[key] = set()
            elif (first.shape, first.dtype) != (row.shape, row.dtype):
                raise ValueError(
                    f"{key} is {first.shape} {first.dtype} and, for another rank, {row.shape} {row.dtype}"
                )
        for piece in saved.manifest.pieces:
            row = saved.manifest.rows[piece.row]
            key = saved.build_key(row)
            select_box(whole.tensors[key], piece.offset, piece.size).copy_(saved.read_tensor(piece))
            have[key].add((piece.offset, piece.size))
    for key, tensor in whole.tensors.items():
        covered = _count_covered(have[key], tensor.ndim) if key in have else tensor.numel()
        if covered != tensor.numel():
            raise ValueError(f"{key} is not whole: {covered} of {tensor.numel()} elements")
    put_lifted_back(whole)
    return whole


def put_lifted_back(whole: Whole) -> None:
    """Put the tensors lifted out of small states back into rank 0's, the only one that is kept."""
    keys = [key for key, row in whole.rows.items() if row.optimizer == LIFTED]
    found = {key: whole.tensors.pop(key) for key in keys}
    for key in keys:
        del whole.rows[key]
    wanted = [lifted_tensor.key for lifted_tensor in lifted.list_lifted(whole.small)]
    if missing := [key for key in wanted if key not in found and f"rank0:{key}" not in found]:
        raise ValueError(f"{missing[0]} is not there")
    own = {key: f"rank0:{key}" for key in wanted if f"rank0:{key}" in found}
    whole.small = lifted.put_back(whole.small, {key: found[own.get(key, key)] for key in wanted})


def _add_late(whole: Whole, saved: SavedShard, row: TensorRow, tensor: torch.Tensor) -> None:
    """Add a tensor that appeared after the first step, which is in each rank's small state."""
    if tuple(tensor.shape) != row.shape:
        raise ValueError(
            f"{row.key} appeared in mid-training, and this version has only parts of it, without their places: "
            "choose a version that was written after a restart of the job"
        )
    whole.rows.setdefault(saved.build_key(row), row)
    whole.tensors.setdefault(saved.build_key(row), tensor)


def _count_covered(boxes: set[Box], ndim: int) -> int:
    """Return the number of elements in any of the boxes.

    The boxes of an MPI program may overlap. They are marked on the grid of all their edges, which has no more cells
    than the tensor has elements.
    """
    edges = [
        np.unique([at for offset, size in boxes for at in (offset[dim], offset[dim] + size[dim])])
        for dim in range(ndim)
    ]
    seen = np.zeros([max(0, len(found) - 1) for found in edges], dtype=bool)
    for offset, size in boxes:
        ends = [np.searchsorted(e, (at, at + n)) for e, at, n in zip(edges, offset, size, strict=True)]
        seen[tuple(slice(*end) for end in ends)] = True
    sizes = reduce(np.multiply.outer, [np.diff(found) for found in edges], np.ones((), dtype=np.int64))
    return int(sizes[seen].sum()) if boxes else 0


def collect_tensors(whole: Whole) -> dict[str, torch.Tensor]:
    """Return only the tensors, buffers included, by key."""
    return {**whole.tensors, **(_list_buffers(whole.small) if whole.small else {})}


def _list_buffers(small: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers that a `state_dict` has, which other programs expect.

    Old versions do not record which buffers are left out of it.
    """
    left_out = set(small.get("transient", ()))
    return {name: _to_plain(tensor) for name, tensor in small["buffers"].items() if name not in left_out}


def as_state(whole: Whole) -> dict[str, Any]:
    """Return the version in the usual form of a checkpoint.

    - `model`: by the names of parameters, buffers and extra state, as `Module.load_state_dict` takes it.
    - `optimizer`: by parameter name, as `set_optimizer_state_dict` of torch.distributed.checkpoint takes it.
    - `extra`: by module.
    - `stateful`: by name.
    - `own`: the tensors of single ranks.

    For an MPI program: its arrays by key. `torch.load` takes all of it with `weights_only`.
    """
    if not whole.small:
        return dict(whole.tensors)
    stateful = _to_plain(whole.small["stateful"])
    model: dict[str, Any] = {}
    extra: dict[str, dict[str, Any]] = {}
    optimizers: list[dict[str, Any]] = [{"state": {}, "param_groups": its} for its in _build_groups(whole.small)]
    count = len(optimizers)
    own: dict[str, torch.Tensor] = {}

    def put(key: str, tensor: Any) -> bool:
        kind, _, name = key.partition(".")
        if kind == "model":
            model[name] = tensor
        elif kind == "extra":
            module, _, name = name.partition(".")
            extra.setdefault(module, {})[name] = tensor
        return kind in ("model", "extra")

    for key, tensor in whole.tensors.items():
        row = whole.rows[key]
        if row.optimizer >= 0 and key == row.key and row.optimizer < count:
            optimizers[row.optimizer]["state"].setdefault(_shorten_name(row.owner), {})[row.name] = tensor
        elif not put(key, tensor):
            own[key] = tensor
    for name, tensor in _list_buffers(whole.small).items():
        put(name, tensor)
    for name, value in whole.small.get("extra_state", {}).items():
        put(name, _to_plain(value))
    for name, known in whole.aliases.items():
        if known in whole.tensors:
            put(name, whole.tensors[known])
    for (number, owner, name), value in whole.small["odd"].items():
        if number < count:
            optimizers[number]["state"].setdefault(_shorten_name(owner), {})[name] = _to_plain(value)
    found: dict[str, Any] = {"model": model, "optimizer": optimizers[0] if count == 1 else optimizers}
    for name, part in (("extra", extra), ("stateful", stateful), ("own", own)):
        if part:
            found[name] = part
    return found


def _shorten_name(fqn: str) -> str:
    """Return a parameter's name as other programs have it, without `model.`."""
    return fqn.partition(".")[2]


def _build_groups(small: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Return each optimizer's `param_groups`, with the names of their parameters.

    Old versions have no such names.

    Raises:
        ValueError: The names are damaged.
    """
    optimizers: list[list[dict[str, Any]]] = _to_plain(small["groups"])
    for found, packed in zip(optimizers, small.get("members", ()), strict=False):
        for group, known in zip(found, groups.unpack(packed), strict=True):
            group["params"] = [_shorten_name(fqn) for fqn in known.params]
            if known.param_names:
                group["param_names"] = known.param_names
    return optimizers


# ---- plain values --------------------------------------------------------------------------------------

_LONG_BITS = 2000  # torch.load reads no number of 2040 bits or more
_KEPT = (type(None), bool, float, complex, str, torch.dtype, torch.device)


def _to_plain(value: Any) -> Any:
    """Return a value in a form that torch.load takes without permission to run anything.

    Bytes and arrays become tensors. Sets, ranges and the like become lists. Times and all other values become text.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if isinstance(value, (bytes, bytearray)):
        return (
            torch.frombuffer(bytearray(value), dtype=torch.uint8)
            if value
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
    if isinstance(value, np.generic):
        return _convert_scalar(value)
    if isinstance(value, np.ndarray):
        return _convert_array(value)
    if isinstance(value, argparse.Namespace):
        return _to_plain(vars(value))
    if isinstance(value, dict):
        return {_convert_key(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_to_plain(item) for item in value), key=repr)  # in the same order each time
    if isinstance(value, tuple):
        return tuple(_to_plain(item) for item in value)
    if isinstance(value, (list, range, deque)):
        return [_to_plain(item) for item in value]
    if isinstance(value, int) and value.bit_length() > _LONG_BITS:
        return hex(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, datetime.date):
        return value.isoformat()
    return value if isinstance(value, (int, *_KEPT)) else repr(value)


def _convert_key(value: Any) -> Any:
    """Return a key in the form of `_to_plain`. A key cannot be a list or a tensor."""
    if isinstance(value, np.generic):
        value = _convert_scalar(value) if value.dtype.kind not in "SmM" else repr(value)
    if isinstance(value, tuple):
        return tuple(_convert_key(item) for item in value)
    if isinstance(value, int):
        return _to_plain(value)
    return value if isinstance(value, (bytes, *_KEPT)) else repr(value)


def _convert_scalar(value: Any) -> Any:
    plain = value.item() if value.dtype.kind not in "mM" else str(value)
    return str(value) if isinstance(plain, np.generic) else _to_plain(plain)  # more bits than Python's numbers have


def _convert_array(value: np.ndarray[Any, Any]) -> Any:
    """Return a tensor; nested lists for element types that torch lacks."""
    native = value.astype(value.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(np.array(native))
    except TypeError:
        items = np.empty(native.shape, dtype=object)
        for at in np.ndindex(native.shape):
            items[at] = _convert_scalar(native[at])
        return items.tolist()
