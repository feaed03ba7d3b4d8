"""torch.distributed.checkpoint in the agents' memory.

    from gemini_hpc.integrations.dcp import GeminiReader, GeminiWriter

    reader = GeminiReader()
    if reader.version:
        dcp.load(state, storage_reader=reader)
    for step in ...:
        dcp.save(state, storage_writer=GeminiWriter())

Every save is a version. A version is sealed when all ranks' parts are on all of their holders. `GeminiReader` also
reads the versions of a `Checkpointer`, by the names of `gemini-hpc export --format dcp`.
"""

from __future__ import annotations

import atexit
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from gemini_hpc.client import joining
from gemini_hpc.core.numbers import check_timeout
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.dtypes import get_item_bytes
from gemini_hpc.format.shard_manifest import ShardManifest, TensorRow
from gemini_hpc.integrations.session import NOTE, StackSession, VersionPart
from gemini_hpc.train.state import encode
from gemini_hpc.train.state.full_state import Whole, as_state, put_lifted_back
from gemini_hpc.train.state.restore import MemoryReader, SavedShard
from gemini_hpc.train.state.tensors import find_dtype, name_dtype
from gemini_hpc.wire.stored import Tier

_VALUES = "values"  # name of the rows that hold encoded values
_SMALL_BYTES, _SMALL_TOGETHER_BYTES = 4 << 10, 1 << 20  # largest value in a note, and all values of a note together
Box = tuple[int, tuple[int, ...], tuple[int, ...]]  # row, offset, size
_sessions: dict[str, StackSession] = {}


def _get_session(name: str, seal_timeout_s: float, tier: Tier) -> StackSession:
    """Return the session of this process and this name. Creating a session is collective.

    The session ends with the process.

    Raises:
        TypeError, ValueError: An argument cannot work.
    """
    joining.check_name(name)
    check_timeout("seal_timeout_s", seal_timeout_s)
    if name not in _sessions:
        if not _sessions:
            atexit.register(_on_exit)
        _sessions[name] = StackSession(name, seal_timeout_s, tier)
    return _sessions[name]


def _on_exit() -> None:
    for session in _sessions.values():
        session.close(success=False)


def close(name: str = "default") -> None:
    """Declare that the training has succeeded, so its copies are no longer needed.

    Without this call the copies are freed with the job.
    """
    session = _sessions.pop(name, None)
    if session is not None:
        session.close(success=True)


class GeminiWriter(StorageWriter):
    """A storage writer to the memory of the agents: `dcp.save(state, storage_writer=GeminiWriter())`.

    Create the first `GeminiWriter` or `GeminiReader` of a process on all ranks together, in the main thread, after
    `init_process_group`. Later ones cost nothing. A save that fails on any rank (an agent is away, no room) is
    skipped on all ranks. One line on stderr reports this, and nothing is raised. Without an agent there is one line
    for the whole run.

    Attributes:
        version: Version of the last save; 0 if it was skipped.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        seal_timeout_s: float = 10.0,
        tier: str | Tier = "",
    ) -> None:
        """Create a writer.

        Args:
            name: Name of the training, if a job runs several.
            seal_timeout_s: Longest wait in seconds for the agents to verify all copies.
            tier: As in `gemini_hpc.Checkpointer`. The first one of the process counts.
        """
        self.version = 0
        self._id = ""
        self._session = _get_session(name, seal_timeout_s, Tier.from_argument(tier))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "GeminiWriter must stay in the process that talks to the agent: use AsyncCheckpointerType.THREAD"
        )

    @property
    def protected(self) -> bool:
        """Return whether there are agents to save to."""
        return self._session.active

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the id of the next save, which is kept with the version (`GeminiReader.checkpoint_id`)."""
        self._id = "" if checkpoint_id is None else os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save the plan's data, and return a future that is already done."""
        session = self._session
        self.version = session.save(lambda: _build_part(plan, planner, self._id, session.rank, session.world))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items] if self.version else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing, because the agents have sealed the version by themselves."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False, because no id names this storage."""
        return False


def _build_part(plan: SavePlan, planner: SavePlanner, checkpoint_id: str, rank: int, world: int) -> VersionPart:
    """Return the plan's items as rows and boxes. An item that is no tensor becomes a row of encoded bytes.

    Raises:
        ValueError: A tensor has a type that no slot can have.
        UnknownTypeError: A value has no encoding.
    """
    note = _Note(checkpoint_id, plan.planner_data)
    rows: list[TensorRow] = []
    found: list[tuple[Box, WriteItem | memoryview]] = []
    number: dict[str, int] = {}
    for item in plan.items:
        key, data = item.index.fqn, item.tensor_data
        if item.type == WriteItemType.BYTE_IO or data is None:
            value = planner.resolve_data(item)
            assert isinstance(value, io.BytesIO)
            raw = encode.encode(_load_own_pickle(value), key)
            note.add_value(key, len(raw), partial(bytes, raw))
            found.append(((len(rows), (0,), (len(raw),)), memoryview(bytearray(raw))))
            rows.append(TensorRow(key, "uint8", (len(raw),), True, "cpu", name=_VALUES))
            continue
        if key not in number:
            number[key] = len(rows)
            rows.append(TensorRow(key, name_dtype(data.properties.dtype), tuple(data.size), True, "cpu"))
        size, row = tuple(data.chunk.sizes), rows[number[key]]
        if math.prod(size):
            found.append(((number[key], tuple(data.chunk.offsets), size), item))
            if size == row.shape:
                note.add_value(key, math.prod(size) * get_item_bytes(row.dtype), partial(_copy_tensor, planner, item))
    packed = bytearray(note.packed)
    found.append(((len(rows), (0,), (len(packed),)), memoryview(packed)))
    rows.append(TensorRow(NOTE, "uint8", (len(packed),), False, "cpu", name=_VALUES))
    pieces = shard_manifest.place_boxes(tuple(rows), [box for box, _ in found])
    manifest = ShardManifest(rank, world, tuple(rows), pieces)

    def store(area: torch.Tensor) -> None:
        for piece, (_, source) in zip(pieces, found, strict=True):
            target = area[piece.start : piece.start + manifest.count_bytes(piece)]
            if isinstance(source, memoryview):
                target.copy_(torch.frombuffer(source, dtype=torch.uint8))
            else:
                value = planner.resolve_data(source)
                assert isinstance(value, torch.Tensor)
                target.view(find_dtype(rows[piece.row].dtype)).view(piece.size).copy_(value.detach())

    return VersionPart(manifest, store)


def _copy_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    return value.detach().cpu().clone()


class GeminiReader(MemoryReader):
    """A storage reader from the memory of the agents: `dcp.load(state, storage_reader=GeminiReader())`.

    The reader loads from the own or the peers' memory, or from the job's tier if memory has nothing. The number of
    ranks may differ from that of the save. Create it on all ranks together, in the main thread, after
    `init_process_group`. A rank that can read its own part fetches no other part. After a save of this process a new
    reader reads that save. For the arguments see `GeminiWriter`.

    For a version of a `Checkpointer` the `state_dict` names are those of `gemini-hpc export`: `model.NAME`,
    `optimizer.state.NAME.exp_avg`, `optimizer.param_groups...`, `stateful.NAME...`.

    Attributes:
        version: Version that is loaded; 0 if there is nothing.
        checkpoint_id: Id of its save; "" if it was saved without.

    Raises:
        SystemExit: There is a version that this launch cannot load. The launch ends so that a new launch can load
            it.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        seal_timeout_s: float = 10.0,
        tier: str | Tier = "",
    ) -> None:
        session = _get_session(name, seal_timeout_s, Tier.from_argument(tier))
        shards = session.list_shards()
        self.version = session.chosen_version
        self.checkpoint_id = ""
        self._values: dict[str, torch.Tensor] = {}  # tensors outside every shard's tensor area
        self._objects: dict[str, Callable[[], Any]] = {}
        self._sources: dict[str, str] = {}  # by the names in the metadata
        super().__init__(shards)
        if shards and shards[0].small_raw:
            self._name_as_exported(shards)
        else:
            self._name_as_saved(shards, [_Note.from_bytes(packed) for packed in session.notes])

    def _name_as_saved(self, shards: Sequence[SavedShard], notes: Sequence[_Note]) -> None:
        known = self.metadata.state_dict_metadata
        for saved in shards:
            for row in saved.manifest.rows:
                key = saved.build_key(row)
                if row.name == _VALUES:
                    self._objects[key] = partial(self._decode_value, key)
                    known[key] = BytesStorageMetadata()
                elif key not in known:  # an empty tensor has no piece
                    known[key] = _describe_whole(torch.empty(row.shape, dtype=find_dtype(row.dtype), device="meta"))
                if row.key == NOTE:
                    del known[key], self._objects[key]
        self.metadata.planner_data = {key: path for note in notes for key, path in note.names.items()}
        for key, value in ((key, value) for note in notes for key, value in note.values.items()):
            if isinstance(value, torch.Tensor):
                self._values[key] = value
            else:
                self._objects[key] = partial(encode.decode, value)
        self.checkpoint_id = notes[0].id if notes else ""

    def _decode_value(self, key: str) -> Any:
        return encode.decode(self.read_piece(key, (0,)).numpy().tobytes())

    def _name_as_exported(self, shards: Sequence[SavedShard]) -> None:
        """Name the tensors of a `Checkpointer`'s version.

        Tensors stand where they are, and the small state is available.
        """
        rows = {saved.build_key(row): row for saved in shards for row in saved.manifest.rows}
        stand_ins = {
            key: torch.empty(row.shape, dtype=find_dtype(row.dtype), device="meta") for key, row in rows.items()
        }
        keys = {id(tensor): key for key, tensor in stand_ins.items()}
        whole = Whole(stand_ins, rows, dict(shards[0].manifest.aliases), shards[0].decode_small(enums=False))
        put_lifted_back(whole)
        flat, self.metadata.planner_data = flatten_state_dict(as_state(whole))
        chunks, known = self.metadata.state_dict_metadata, dict[str, Any]()
        for name, value in flat.items():
            if not isinstance(value, torch.Tensor):
                self._objects[name] = partial(lambda same: same, value)
                known[name] = BytesStorageMetadata()
            elif (key := keys.get(id(value))) is None:
                self._values[name] = value
                known[name] = _describe_whole(value)
            elif key in chunks:
                self._sources[name] = key
                known[name] = chunks[key]
        self.metadata.state_dict_metadata = known

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Check that this id is that of the loaded version.

        Raises:
            ValueError: The id is another one.
        """
        wanted = None if checkpoint_id is None else os.fspath(checkpoint_id)
        if wanted is not None and self.version and wanted != self.checkpoint_id:
            raise ValueError(f"wanted {wanted!r}, but version {self.version} in memory is {self.checkpoint_id!r}")

    def read_metadata(self, *args: Any) -> Metadata:
        """Return the metadata of the version.

        Raises:
            ValueError: There is nothing to load.
        """
        if not self.version:
            raise ValueError("there is nothing to load in memory or on the tier: check GeminiReader.version first")
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's data.

        Raises:
            AgentLost, AgentRefused, OSError, ValueError: A part of another rank cannot be fetched.
        """
        tensors = []
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, write_pickle(self.read_value(key)))
            else:
                tensors.append(item)
        return super().read_data(replace(plan, items=tensors), planner)

    def read_value(self, key: str) -> Any:
        """Return a saved value that is no tensor.

        Raises:
            KeyError: There is no such value.
            ValueError: The bytes are no encoded value.
        """
        return self._objects[key]()

    def read_piece(self, key: str, offset: tuple[int, ...]) -> torch.Tensor:
        """Return a chunk of the metadata as a tensor."""
        return self._values[key] if key in self._values else super().read_piece(self._sources.get(key, key), offset)


class _Note:
    """The information about a rank's part that all ranks get before they read.

    A note has the id, the place of each key in the state, and small values. So no rank has to fetch another rank's
    part for a step number.
    """

    def __init__(self, checkpoint_id: str, names: Any, values: Mapping[str, Any] | None = None) -> None:
        self.id, self.names, self.values = checkpoint_id, names if isinstance(names, dict) else {}, dict(values or {})
        self._room_bytes = _SMALL_TOGETHER_BYTES

    def add_value(self, key: str, size_bytes: int, value: Callable[[], Any]) -> None:
        """Add a whole tensor, or encoded bytes, if it is small enough."""
        if size_bytes <= min(_SMALL_BYTES, self._room_bytes):
            self._room_bytes -= size_bytes
            self.values[key] = value()

    @property
    def packed(self) -> bytes:
        try:
            return encode.encode([self.id, self.names, self.values])
        except encode.UnknownTypeError:  # the planner has data of its own
            return encode.encode([self.id, {}, self.values])

    @classmethod
    def from_bytes(cls, packed: bytes) -> _Note:
        """Return the note from its packed bytes.

        Raises:
            ValueError: The bytes are no note.
        """
        return cls(*encode.decode(packed))


def _describe_whole(tensor: torch.Tensor) -> TensorStorageMetadata:
    """Return the metadata of a tensor in one chunk, or in none if the tensor is empty."""
    chunks = [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)] if tensor.numel() else []
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)


def _load_own_pickle(pickled: io.BytesIO) -> Any:
    """Return the value that the planner of this rank has just pickled: bytes that never left this process."""
    pickled.seek(0)
    return torch.load(pickled, weights_only=False)


def write_pickle(value: Any) -> io.BytesIO:
    """Return a value as DCP's planners unpickle it. The types are those of `encode`, which carry no code."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
