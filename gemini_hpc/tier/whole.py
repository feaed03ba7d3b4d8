"""A version of the tier in one process: its tensors whole, by name, and its small state. With torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gemini_hpc.core.directory import Manifest, Piece, Row
from gemini_hpc.tier import version
from gemini_hpc.tier.nodefile import Reader
from gemini_hpc.train.dtypes import dtype_of
from gemini_hpc.train.restore import Saved
from gemini_hpc.wire.stored import Stored


@dataclass
class Whole:
    """tensors: by key; what was one rank's own is `rank3:KEY`. rows: what is known of each. small: of rank 0."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)


@contextmanager
def opened(where: str, manifest: version.Manifest) -> Iterator[list[Saved]]:
    """All shards of a version, by rank. Only their directories and small states are read now, tensors when they are
    asked for, each checked against its digest. Raises OSError, ValueError, also when a tensor is read."""
    with ExitStack() as files:
        shards = []
        for file in manifest.files:
            reader = files.enter_context(Reader(f"{where}/{file.name}"))
            shards += [_shard(reader, stored) for stored in file.shards]
        yield sorted(shards, key=lambda saved: saved.manifest.rank)


def _shard(reader: Reader, stored: Stored) -> Saved:
    header, manifest, small = reader.parts(stored)
    return Saved(header, manifest, lambda piece: _raw(reader, manifest, piece), small)


def _raw(reader: Reader, manifest: Manifest, piece: Piece) -> torch.Tensor:
    return torch.frombuffer(reader.piece(manifest, piece), dtype=torch.uint8)


def read(where: str, manifest: version.Manifest) -> Whole:
    """Of the version's directory `where`. Raises OSError, ValueError where a tensor is damaged or not whole."""
    with opened(where, manifest) as shards:
        return _join(shards)


def _join(shards: Iterable[Saved]) -> Whole:
    whole, have = Whole(), dict[str, dict[tuple[int, ...], int]]()
    for saved in shards:
        if saved.manifest.rank == 0:
            whole.small, whole.aliases = saved.small(), dict(saved.manifest.aliases)
        for row in saved.manifest.rows:
            key = saved.key(row)
            if key not in whole.tensors:
                whole.tensors[key] = torch.zeros(row.shape, dtype=dtype_of(row.dtype))
                whole.rows[key], have[key] = row, {}
        for piece in saved.manifest.pieces:
            row = saved.manifest.rows[piece.row]
            key = saved.key(row)
            part = saved.tensor(piece)
            target = whole.tensors[key]
            for dim, (start, length) in enumerate(zip(piece.offset, piece.size, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(part)
            have[key][piece.offset] = part.numel()
    for key, tensor in whole.tensors.items():
        if sum(have[key].values()) != tensor.numel():
            raise ValueError(f"{key} is not whole: {sum(have[key].values())} of {tensor.numel()} elements")
    return whole


def as_state(whole: Whole) -> dict[str, Any]:
    """The usual form of a checkpoint: `model` by parameter and buffer name, as `Module.load_state_dict` takes it;
    `optimizer` by parameter name; `extra` by module; `stateful` by name; `own` what was a single rank's."""
    model: dict[str, torch.Tensor] = {}
    extra: dict[str, dict[str, torch.Tensor]] = {}
    count = len(whole.small["groups"])
    optimizers: list[dict[str, Any]] = [{"state": {}, "param_groups": whole.small["groups"][i]} for i in range(count)]
    own: dict[str, torch.Tensor] = {}

    def put(key: str, tensor: torch.Tensor) -> bool:
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
            state = optimizers[row.optimizer]["state"]
            state.setdefault(row.owner.partition(".")[2], {})[row.name] = tensor
        elif not put(key, tensor):
            own[key] = tensor
    for name, tensor in whole.small["buffers"].items():
        put(name, tensor)
    for name, known in whole.aliases.items():
        if known in whole.tensors:
            put(name, whole.tensors[known])
    for (number, owner, name), value in whole.small["odd"].items():
        if number < count:
            optimizers[number]["state"].setdefault(owner.partition(".")[2], {})[name] = value
    found: dict[str, Any] = {"model": model, "optimizer": optimizers[0] if count == 1 else optimizers}
    for name, part in (("extra", extra), ("stateful", _plain(whole.small["stateful"])), ("own", own)):
        if part:
            found[name] = part
    return found


def _plain(value: Any) -> Any:
    """Without what torch.load refuses unless it may run anything: bytes and arrays of NumPy become tensors."""
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(_plain(item) for item in value) if isinstance(value, (list, tuple)) else value
