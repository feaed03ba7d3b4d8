"""Restoring of a training to a saved version: shards from the agent, tensors through DCP's loader.

The saved boxes are described as `torch.distributed.checkpoint` metadata and read from memory. So DCP's stock load
planner does the resharding when the new run is cut differently.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from gemini_hpc.client.session import RankSession
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import LIFTED, PARAMETER, Piece, ShardManifest, TensorRow
from gemini_hpc.format.slot_header import HEADER_BYTES, Header, parse_header
from gemini_hpc.train.device.memory import map_copy
from gemini_hpc.train.state import encode, inner, lifted
from gemini_hpc.train.state.tensors import find_dtype, get_local, select_box
from gemini_hpc.train.state.tree import Leaf, StateTree, compute_local_box
from gemini_hpc.wire import local

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, size


@dataclass(frozen=True)
class SavedShard:
    """A shard in memory or in a file. `read_bytes` returns the bytes of one of its pieces."""

    header: Header
    manifest: ShardManifest
    read_bytes: Callable[[Piece], torch.Tensor]
    small_raw: bytes

    @classmethod
    def from_slot(cls, memory: torch.Tensor, total_bytes: int) -> SavedShard:
        """Parse the used bytes of a slot.

        Args:
            memory: The used bytes.
            total_bytes: Size of the slot.

        Raises:
            ValueError: The bytes are damaged, or there are too few.
        """
        header = parse_header(memory[:HEADER_BYTES].numpy().tobytes(), total_bytes)
        layout = header.layout
        if memory.numel() < header.used_bytes:
            raise ValueError(f"a copy of {memory.numel()} bytes, {header.used_bytes} wanted")
        raw = memory[layout.manifest_offset : layout.manifest_offset + layout.manifest_bytes].numpy().tobytes()
        manifest = shard_manifest.unpack(raw, layout.tensor_bytes)
        area = memory[layout.tensor_offset : layout.tensor_offset + layout.tensor_bytes]
        small = memory[layout.small_offset : header.used_bytes].numpy().tobytes()
        return cls(
            header, manifest, lambda piece: area[piece.start : piece.start + manifest.count_bytes(piece)], small
        )

    def read_tensor(self, piece: Piece) -> torch.Tensor:
        """Return a piece with its own type and size.

        Raises:
            ValueError: The piece is damaged.
            OSError: The piece cannot be read.
        """
        dtype = find_dtype(self.manifest.rows[piece.row].dtype)
        return self.read_bytes(piece).view(dtype).view(piece.size)

    def decode_small(self, *, enums: bool = True) -> dict[str, Any]:
        """Return the decoded small state.

        Args:
            enums: See `encode.decode`.

        Raises:
            ValueError: The small state is missing or damaged.
        """
        if not self.small_raw:
            raise ValueError(
                "the version is from torch.distributed.checkpoint or an MPI program: arrays only, no training state"
            )
        value = encode.decode(self.small_raw, enums=enums)
        wanted = {"rng", "buffers", "groups", "odd", "stateful", "buckets", "late"}
        if not isinstance(value, dict) or not wanted <= value.keys():
            raise ValueError("the small state lacks some of its parts")
        return value

    def build_key(self, row: TensorRow) -> str:
        """Return the name of a row among all shards. A tensor that is not shared is named after its rank."""
        return row.key if row.shared else f"rank{self.manifest.rank}:{row.key}"


class MemoryReader(StorageReader):
    """A storage reader from which DCP reads its chunks of mapped memory."""

    def __init__(self, shards: Iterable[SavedShard]) -> None:
        super().__init__()
        self._places: dict[tuple[str, tuple[int, ...]], tuple[SavedShard, Piece]] = {}
        found: dict[str, tuple[TensorRow, dict[tuple[int, ...], tuple[int, ...]]]] = {}
        for saved in shards:
            manifest = saved.manifest
            for piece in manifest.pieces:
                row = manifest.rows[piece.row]
                key = saved.build_key(row)
                first, chunks = found.setdefault(key, (row, {}))
                if (first.shape, first.dtype) != (row.shape, row.dtype):
                    raise ValueError(f"shards disagree about {row.key}")
                if piece.offset in chunks:
                    continue  # several ranks keep all of it: any copy will do
                chunks[piece.offset] = piece.size
                self._places[key, piece.offset] = saved, piece
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=find_dtype(row.dtype)),
                size=torch.Size(row.shape),
                chunks=[ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks.items()],
            )
            for key, (row, chunks) in found.items()
        }
        self.metadata = Metadata(state_dict_metadata=entries)

    def find_fault(self, key: str, tensor: torch.Tensor) -> str:
        """Return the reason why `tensor` cannot be filled from here; empty if it can."""
        known = self.metadata.state_dict_metadata.get(key)
        if not isinstance(known, TensorStorageMetadata):
            return "is not in the saved state"
        if tuple(known.size) != tuple(tensor.shape) or known.properties.dtype != tensor.dtype:
            return (
                f"is {tuple(tensor.shape)} {tensor.dtype}, was saved as {tuple(known.size)} {known.properties.dtype}"
            )
        offset, size = _find_box(tensor)
        covered = sum(_count_overlap((offset, size), (tuple(c.offsets), tuple(c.sizes))) for c in known.chunks)
        return "" if covered == math.prod(size) else f"has {covered} of {math.prod(size)} elements in the saved state"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of all shards."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the shards need no preparation."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_piece(self, key: str, offset: tuple[int, ...]) -> torch.Tensor:
        """Return a chunk.

        Raises:
            ValueError: The chunk is damaged.
            OSError: The chunk cannot be read.
        """
        saved, piece = self._places[key, offset]
        return saved.read_tensor(piece)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the planned chunks into their targets."""
        for item in plan.items:
            piece = self.read_piece(item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            target = planner.resolve_tensor(item)
            target.detach().copy_(select_box(piece, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | Path) -> bool:  # type: ignore[override]
        """Return False: memory has no checkpoint ids."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the reader has no state to reset."""


def _find_box(tensor: torch.Tensor) -> Box:
    if isinstance(tensor, DTensor):
        size, offset = compute_local_box(tensor)
        return offset, size
    return (0,) * tensor.ndim, tuple(tensor.shape)


def _count_overlap(a: Box, b: Box) -> int:
    sides = (
        max(0, min(ao + asz, bo + bsz) - max(ao, bo)) for ao, asz, bo, bsz in zip(a[0], a[1], b[0], b[1], strict=True)
    )
    return math.prod(sides)


def fetch_shard(session: RankSession, rank: int) -> tuple[SavedShard, local.Copy]:
    """Return a shard of the version that the agents have chosen, and the agent's answer.

    Raises:
        AgentLost: There is no agent.
        AgentRefused: The agent has no copy.
        OSError: The copy cannot be mapped.
        ValueError: The copy is damaged, or is not the expected one.
    """
    reply, fd = session.fetch(rank)
    saved = SavedShard.from_slot(map_copy(fd, reply.used), reply.bytes)
    if (saved.header.stamp.version, saved.header.rank) != (session.welcome.chosen_version, rank):
        raise ValueError(f"shard {rank} holds version {saved.header.stamp} of rank {saved.header.rank}")
    return saved, reply


def is_self_sufficient(saved: SavedShard, tree: StateTree) -> bool:
    """Return whether this rank's own shard has everything that this rank needs.

    The shard has it if the state is sharded and the world is the same.
    """
    manifest = saved.manifest
    kept = [0] * len(manifest.rows)
    for piece in manifest.pieces:
        kept[piece.row] += math.prod(piece.size)
    needed = {leaf.key: math.prod(_find_box(leaf.tensor)[1]) for leaf in tree.find_leaves()[0] if leaf.optimizer < 0}
    for row, have in zip(manifest.rows, kept, strict=True):
        if row.optimizer == LIFTED or (row.optimizer >= 0 and not row.like_owner):
            wanted = math.prod(row.shape)
        else:
            wanted = needed.get(row.owner or row.key, -1)
        if have != wanted:
            return False
    return needed.keys() <= {row.key for row in manifest.rows}


def make_optimizer_state(tree: StateTree, rows: Sequence[TensorRow], small: dict[str, Any]) -> None:
    """Give each optimizer exactly the state tensors that the saved run had, with any content.

    Running a step of the optimizer would do less well: it also makes state for parameters that had none.
    """
    params = {p.fqn: p.tensor for p in tree.params}
    wanted: dict[tuple[int, str], dict[str, TensorRow | None]] = {}
    composed: dict[tuple[int, str, str], dict[str, TensorRow]] = {}  # parts of tensors made of others
    made = {where: recipe for where, recipe in inner.read_recipes(small).items() if where[0] >= 0}
    parts = {
        (i, owner, f"{name}.{path}"): (name, path)
        for (i, owner, name), m in made.items()
        for path in inner.list_paths(m)
    }
    for row in rows:
        if row.optimizer < 0:
            continue
        name, path = parts.get((row.optimizer, row.owner, row.name), (row.name, ""))
        wanted.setdefault((row.optimizer, row.owner), {})[name] = row
        if path:
            composed.setdefault((row.optimizer, row.owner, name), {})[path] = row
    for i, owner, name in small["odd"]:
        wanted.setdefault((i, owner), {})[name] = None
    for i, optimizer in enumerate(tree.optimizers):
        param_ids = {id(p): None for group in optimizer.param_groups for p in group["params"]}
        for parameter in [p for p in optimizer.state if id(p) in param_ids]:
            if not any(params[o] is parameter for (n, o) in wanted if n == i and o in params):
                del optimizer.state[parameter]
    for (i, owner), names in wanted.items():
        if owner not in params or i >= len(tree.optimizers):
            raise ValueError(f"the saved optimizer {i} has state of {owner}, which this training does not have")
        parameter = params[owner]
        state = tree.optimizers[i].state[parameter]
        for name in [n for n in state if n not in names]:
            del state[name]
        for name, wanted_row in names.items():
            old = state.get(name)
            if wanted_row is None:
                state[name] = small["odd"][i, owner, name]
            elif (i, owner, name) in composed:
                state[name] = _ensure_composed(old, made[i, owner, name], composed[i, owner, name], parameter)
            else:
                state[name] = _ensure_tensor(old, wanted_row, parameter)


def _ensure_tensor(old: Any, row: TensorRow, parameter: torch.Tensor) -> torch.Tensor:
    """Return the present tensor if it has the row's shape and type; else a new one, with any content."""
    dtype, local_tensor = find_dtype(row.dtype), get_local(parameter)
    shape = tuple(parameter.shape) if row.like_owner else row.shape
    same = isinstance(old, torch.Tensor) and (tuple(old.shape), old.dtype) == (shape, dtype)
    if same and (row.like_owner or not isinstance(old, DTensor)):
        kept: torch.Tensor = old
        return kept
    for like in (parameter, local_tensor):
        if row.like_owner or (row.shape and tuple(like.shape) == row.shape):
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(row.shape, dtype=dtype, device=_choose_device(row, local_tensor))


def _choose_device(row: TensorRow, local_tensor: torch.Tensor) -> torch.device:
    """Return the parameter's device if the row's tensor was on such a one, else the device that the row names."""
    return local_tensor.device if row.device == local_tensor.device.type else torch.device(row.device)


def _ensure_composed(
    old: Any, made: dict[str, Any], rows: dict[str, TensorRow], parameter: torch.Tensor
) -> torch.Tensor:
    """Return the present tensor if it is made in this way, of such parts; else a new one.

    Raises:
        ValueError: The saved state lacks a part.
    """
    if isinstance(old, torch.Tensor) and inner.is_composed(old) and inner.build_recipe(old) == made:
        present_parts = {path: (tuple(part.shape), part.dtype) for path, part in inner.list_parts(old)}
        if present_parts == {path: (row.shape, find_dtype(row.dtype)) for path, row in rows.items()}:
            return old

    def build_part(path: str) -> torch.Tensor:
        if path not in rows:
            raise ValueError(f"a {made['class']} lacks its part {path} in the saved state")
        row = rows[path]
        device = _choose_device(row, get_local(parameter))
        return torch.zeros(row.shape, dtype=find_dtype(row.dtype), device=device)

    return inner.build_tensor(made, build_part, parameter)


def load(
    tree: StateTree, own: SavedShard, shards: Sequence[SavedShard], rank: int, same_world: bool
) -> dict[str, Any]:
    """Fill parameters and optimizer state from `shards`, and put the small state of `own` back.

    The generators are not put back. The call is collective only as far as DDP's buckets are replayed.

    Args:
        tree: The state of this training.
        own: The shard whose small state is put back.
        shards: The shards to read from.
        rank: This rank.
        same_world: The saved run had as many ranks.

    Returns:
        The small state.

    Raises:
        ValueError: The saved state does not fit this training.
    """
    small = own.decode_small()
    tree.reshard()
    for recorder, order in zip(tree.ddps, small["buckets"], strict=False):
        recorder.replay(order)
    rows = {row.key: row for row in own.manifest.rows}
    if not same_world:
        # an optimizer that shards by parameter has other parameters on other ranks
        steps = [tree.list_stepped(number) for number in range(len(tree.optimizers))]
        rows = {key: row for key, row in rows.items() if _is_mine(row, steps)}
        for saved in shards:
            rows = {row.key: row for row in saved.manifest.rows if _is_mine(row, steps)} | rows
    late = {
        row.key: (row, tensor) for row, tensor in ((TensorRow(*fields), tensor) for fields, tensor in small["late"])
    }
    if same_world and own.manifest.rank == rank:
        _check_nothing_is_lost(tree, [*own.manifest.rows, *(row for row, _ in late.values())])
    with torch.no_grad():
        reader = MemoryReader(shards)
        small = _restore_lifted(small, reader, own)
        make_optimizer_state(tree, [*rows.values(), *(row for row, _ in late.values())], small)
        leaves, _ = tree.find_leaves()
        rounds: list[dict[str, torch.Tensor]] = []  # tensors tied in the saved run, but not here, are read twice
        problems = []
        for leaf in leaves:
            if leaf.key in late:
                _fill_late(leaf, *late[leaf.key])
                continue
            key, why = _find_source(reader, own, leaf, rank)
            if why:
                problems.append(f"{leaf.key} {why}")
            elif get_local(leaf.tensor).numel():
                free = next((targets for targets in rounds if key not in targets), None)
                if free is None:
                    rounds.append(free := {})
                free[key] = leaf.tensor.detach()
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise ValueError(f"the saved state does not fit this training: {'; '.join(problems[:3])}{more}")
        for targets in rounds:
            _read_targets(targets, reader)
        tree.restore_small(small, same_world=same_world)
    return small


def read_saved_units(small: Mapping[str, Any], world: int) -> dict[str, int]:
    """Return the units in which the loader's position may count.

    Args:
        small: The small state of one of the ranks.
        world: Number of ranks of that run.
    """
    return {**small.get("counted", {}), "ranks": world}


def _restore_lifted(small: dict[str, Any], reader: MemoryReader, own: SavedShard) -> dict[str, Any]:
    """Return the small state of `own` with the lifted tensors put back.

    Raises:
        ValueError: A lifted tensor is missing.
    """
    loaded: dict[str, torch.Tensor] = {}
    targets: dict[str, torch.Tensor] = {}
    for wanted in lifted.list_lifted(small):
        tensor = loaded[wanted.key] = lifted.allocate_tensor(wanted)
        key, why = _find_saved(reader, (f"rank{own.manifest.rank}:{wanted.key}", wanted.key), tensor)
        if why:
            raise ValueError(f"the saved state is not whole: {wanted.key} {why}")
        targets[key] = tensor
    if targets:
        _read_targets(targets, reader)
    found: dict[str, Any] = lifted.put_back(small, loaded)
    return found


def _is_mine(row: TensorRow, steps: Sequence[set[str]]) -> bool:
    return row.optimizer < 0 or (row.optimizer < len(steps) and row.owner in steps[row.optimizer])


def _read_targets(targets: dict[str, torch.Tensor], reader: StorageReader) -> None:
    """Read the targets through DCP.

    Raises:
        ValueError: A chunk cannot be read, also where DCP raises a BaseException for it.
    """
    try:
        with warnings.catch_warnings():  # DCP warns that it loads without collectives, which is intended
            warnings.simplefilter("ignore", UserWarning)
            state_dict_loader.load(targets, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0] if error.failures else error
        raise ValueError(str(first)) from error


def _check_nothing_is_lost(tree: StateTree, rows: Iterable[TensorRow]) -> None:
    known = {leaf.key for leaf in tree.find_leaves()[0] if leaf.optimizer < 0} | tree.aliases.keys()
    if unknown := sorted(row.key for row in rows if row.optimizer == PARAMETER and row.key not in known):
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ValueError(
            f"the saved run had {unknown[0]}{more}, which this training does not have: where it was added in "
            "mid-training, add it before resume()"
        )


def _fill_late(leaf: Leaf, row: TensorRow, saved: torch.Tensor) -> None:
    local_tensor = get_local(leaf.tensor)
    if local_tensor.shape != saved.shape:
        raise ValueError(
            f"{row.key} was created after the first step and was captured rank by rank: it can only be loaded "
            "on as many ranks as it was saved from"
        )
    local_tensor.copy_(saved)


def _find_source(reader: MemoryReader, own: SavedShard, leaf: Leaf, rank: int) -> tuple[str, str]:
    """Return the leaf's key among the shards, and the reason why it cannot be read or an empty text."""
    if not get_local(leaf.tensor).numel():
        return leaf.key, ""
    names = [leaf.key, f"rank{rank}:{leaf.key}", f"rank{own.manifest.rank}:{leaf.key}"]
    if leaf.key in own.manifest.aliases:  # tied in the saved run, not in this one
        names.append(own.manifest.aliases[leaf.key])
    return _find_saved(reader, names, leaf.tensor)


def _find_saved(reader: MemoryReader, names: Sequence[str], tensor: torch.Tensor) -> tuple[str, str]:
    """Return the first name with a saved tensor, and the reason why `tensor` cannot be filled from it or ""."""
    known = [name for name in names if name in reader.metadata.state_dict_metadata]
    if not known:
        return names[0], "is not in the saved state"
    return known[0], reader.find_fault(known[0], tensor)
