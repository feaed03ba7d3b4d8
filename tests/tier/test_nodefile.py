"""A node's file on the tier: any HDF5 program reads it, and a slot comes back from it byte by byte."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5t

from gemini_hpc.format.dtypes import ITEM_BYTES
from gemini_hpc.format.shard_manifest import TensorRow
from gemini_hpc.tier import hdf5, nodefile
from gemini_hpc.tier.nodefile import NodeFileReader
from gemini_hpc.tier.readahead import Ahead

from . import slots

ROWS = (
    TensorRow("model.w", "float32", (6, 5), True, "cpu"),
    TensorRow("model.half", "bfloat16", (7,), True, "cpu"),
    TensorRow("optimizer.0.model.w.step", "float32", (), False, "cpu", 0, "model.w", "step"),
    TensorRow("model.a/b%", "int64", (3,), True, "cpu"),
    TensorRow("model.empty", "float32", (0, 4), True, "cpu"),
)
BOXES = [(0, (2, 0), (3, 5)), (1, (0,), (7,)), (2, (), ()), (3, (1,), (2,))]


def never(_: int) -> None:
    pass


def test_a_slot_comes_back_byte_by_byte_without_what_lay_between(tmp_path: Path) -> None:
    for compress in (False, True):
        slot = slots.make(1, 2, ROWS, BOXES)
        file = nodefile.write(
            str(tmp_path), "node-0001.h5", [(slot.shard(), 7, slot.digest())], never, compress=compress
        )
        slot.shard().clear_gaps()  # what is to come back
        (stored,) = file.shards
        assert (stored.rank, stored.home, stored.bytes, stored.used) == (1, 7, len(slot.memory), slot.used), compress
        assert stored.digest == slot.digest(), compress
        assert file.bytes == (tmp_path / file.name).stat().st_size, compress
        into = bytearray(b"\xaa" * stored.used)
        with NodeFileReader(str(tmp_path / file.name)) as reader:
            reader.read(stored, memoryview(into))
            assert reader.read_manifest(1) == slot.manifest, compress
        assert into == slot.memory[: slot.used], compress
        assert os.listdir(tmp_path) == ["node-0001.h5"], compress


def test_the_digest_is_of_zeros_wherever_garbage_lies_between(tmp_path: Path) -> None:
    """`clean`: between so many of the areas there are zeros already."""
    for clean in (0, 1, 3, 9):
        rows = tuple(TensorRow(f"model.{i}", "uint8", (100 - i,), True, "cpu") for i in range(6))
        slot = slots.make(0, 1, rows, [(i, (0,), row.shape) for i, row in enumerate(rows)])
        at = 0
        for area in [*slot.shard().list_areas()][: clean + 1]:
            slot.view[at : area.begin] = bytes(area.begin - at)
            at = area.end
        (stored,) = nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], never).shards
        before = slot.digest()
        slot.shard().clear_gaps()
        assert stored.digest == slot.digest() and (slot.digest() == before) == (clean == 9), clean


def test_any_hdf5_program_finds_the_tensors(tmp_path: Path) -> None:
    slot = slots.make(1, 2, ROWS, BOXES)
    nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], never)
    with h5py.File(tmp_path / "n.h5") as file:
        tensors = file["rank1/tensors"]
        assert sorted(tensors) == ["model.a%2Fb%25@1", "model.half", "model.w@2,0", "optimizer.0.model.w.step"]
        w = tensors["model.w@2,0"]
        assert w.dtype == np.float32 and w.shape == (3, 5)
        assert w[...].tobytes() == slot.values["model.w", (2, 0)]
        assert list(w.attrs["offset"]) == [2, 0] and list(w.attrs["global_shape"]) == [6, 5]
        assert len(w.attrs["xxh3_128"]) == 32
        assert tensors["optimizer.0.model.w.step"][()] == np.frombuffer(
            slot.values["optimizer.0.model.w.step", ()], np.float32
        )
        half = tensors["model.half"]
        wide = np.frombuffer(slot.values["model.half", (0,)], np.uint16).astype(np.uint32) << 16
        assert half.attrs["dtype"] == "bfloat16"
        assert half[...].astype(np.float32).tobytes() == wide.view(np.float32).tobytes()


def test_every_dtype_has_a_type_of_its_size(tmp_path: Path) -> None:
    for dtype in sorted(ITEM_BYTES):
        assert hdf5.choose_type(dtype).get_size() == ITEM_BYTES[dtype], dtype
        row = TensorRow("x", dtype, (5,), True, "cpu")
        slot = slots.make(0, 1, (row,), [(0, (0,), (5,))])
        file = nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], never)
        into = bytearray(slot.used)
        with NodeFileReader(str(tmp_path / "n.h5")) as reader:
            reader.read(file.shards[0], memoryview(into))
        slot.shard().clear_gaps()
        assert into == slot.memory[: slot.used], dtype


def test_bfloat16_is_a_float_for_others() -> None:
    kind = hdf5.choose_type("bfloat16")
    assert isinstance(kind, h5t.TypeFloatID) and kind.get_size() == 2


def test_damage_is_found(tmp_path: Path) -> None:
    slot = slots.make(0, 1, ROWS, [(0, (0, 0), (6, 5))])
    file = nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], never)
    with h5py.File(tmp_path / "n.h5") as opened:
        at = opened["rank0/tensors/model.w"].id.get_offset()
    data = bytearray((tmp_path / "n.h5").read_bytes())
    data[at + 7] ^= 1
    (tmp_path / "n.h5").write_bytes(data)
    with NodeFileReader(str(tmp_path / "n.h5")) as reader, pytest.raises(ValueError, match="damaged"):
        reader.read(file.shards[0], memoryview(bytearray(slot.used)))


def test_a_shard_of_another_rank_is_not_there(tmp_path: Path) -> None:
    slot = slots.make(0, 1, ROWS, [(0, (0, 0), (6, 5))])
    file = nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], never)
    other = type(file.shards[0])(3, 0, len(slot.memory), slot.used, "0" * 32)
    with NodeFileReader(str(tmp_path / "n.h5")) as reader, pytest.raises(ValueError, match="rank 3"):
        reader.read(other, memoryview(bytearray(slot.used)))


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    slot = slots.make(0, 1, ROWS, BOXES)

    def full(_: int) -> None:
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], full)
    assert os.listdir(tmp_path) == []


def test_all_bytes_are_paced(tmp_path: Path) -> None:
    went: list[int] = []
    slot = slots.make(0, 1, ROWS, BOXES)
    nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], went.append)
    assert sum(went) >= sum(map(len, slot.values.values()))


LARGE = (
    TensorRow("model.matrix", "float32", (1000, 700), True, "cpu"),
    TensorRow("model.one", "bfloat16", (1, 3, 700_000), True, "cpu"),
    TensorRow("model.cube", "float64", (5, 7, 9000), True, "cpu"),
    TensorRow("model.line", "uint8", (1 << 20,), True, "cpu"),
    TensorRow("model.few", "int16", (100,), True, "cpu"),
)
LARGE_BOXES = [(0, (1, 0), (999, 700)), *((i, (0,) * len(row.shape), row.shape) for i, row in enumerate(LARGE) if i)]


def test_compressed_tensors_are_written_and_read_part_by_part(tmp_path: Path) -> None:
    """An agent that hears nothing for long takes the file system for dead."""
    slot, wrote, read = slots.make(0, 1, LARGE, LARGE_BOXES), list[int](), list[int]()
    shards = [(slot.shard(), 0, slot.digest())]
    file = nodefile.write(str(tmp_path), "n.h5", shards, wrote.append, compress=True)
    with h5py.File(tmp_path / "n.h5") as opened:
        found = {item.attrs["tensor"]: item for item in opened["rank0/tensors"].values()}
        for (key, _), data in slot.values.items():
            whole = bytearray(len(data))
            hdf5.get(found[key].id, whole)
            assert whole == data, "any HDF5 program sees the tensor in its order"
            assert (found[key].compression == "gzip") == (key != "model.few")
        assert sum(item.id.get_storage_size() for item in found.values()) < 0.9 * sum(map(len, slot.values.values()))
    into = bytearray(slot.used)
    with NodeFileReader(str(tmp_path / "n.h5")) as reader:
        reader.read(file.shards[0], memoryview(into), read.append)
    slot.shard().clear_gaps()
    assert into == slot.memory[: slot.used]
    assert max(wrote) < 2 << 20 and sum(wrote) == sum(read) and max(read) < 2 << 20


@pytest.mark.slow
@pytest.mark.parametrize("compress", [False, True])
def test_shards_of_many_sizes_come_back_when_they_are_read_ahead(tmp_path: Path, compress: bool) -> None:
    """Large tensors and small ones by turns, three ranks in a file, each read from where it about begins."""
    sizes = [3_000_001, 1, 70_000, 513, 1 << 20, 0, 4096, 65_536] * 8
    rows = tuple(TensorRow(f"model.{i}", "uint8", (size,), True, "cpu") for i, size in enumerate(sizes))
    made = [slots.make(rank, 3, rows, [(i, (0,), row.shape) for i, row in enumerate(rows)]) for rank in range(3)]
    shards = [(slot.shard(), 0, slot.digest()) for slot in made]
    path = tmp_path / "n.h5"
    file = nodefile.write(str(tmp_path), path.name, shards, never, compress=compress)
    begin = 0
    for slot, stored in zip(made, file.shards, strict=True):
        into = bytearray(b"\xaa" * stored.used)
        with closing(Ahead(str(path), begin, stored.used)) as ahead, NodeFileReader(str(path), ahead) as reader:
            reader.read(stored, memoryview(into))
            for piece in slot.manifest.pieces:
                assert reader.read_piece(slot.manifest, piece) == slot.values[slot.manifest.rows[piece.row].key, (0,)]
        slot.shard().clear_gaps()
        assert into == slot.memory[: slot.used]
        begin += stored.used


def test_little_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, came = slots.make(0, 1, LARGE, LARGE_BOXES), list[int]()
    file = nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], never)
    take = Ahead.copy_ahead

    def counted(self: Ahead, into: memoryview, at: int) -> int:
        came.append(take(self, into, at))
        return came[-1]

    monkeypatch.setattr(Ahead, "copy_ahead", counted)
    with (
        closing(Ahead(str(tmp_path / "n.h5"), 0, slot.used)) as ahead,
        NodeFileReader(str(tmp_path / "n.h5"), ahead) as reader,
    ):
        reader.read(file.shards[0], memoryview(bytearray(slot.used)))
    assert sum(came) >= 0.9 * slot.used


@pytest.mark.parametrize("compress", [False, True])
def test_it_is_synced_now_and_then_and_says_so(
    tmp_path: Path, compress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a slow file system has not written yet is bounded when the last sync begins."""
    slot, heard = slots.make(0, 1, LARGE, LARGE_BOXES), list[int | str]()
    sync = os.fdatasync

    def watched(fd: int) -> None:
        heard.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(nodefile, "_SYNC_BYTES", 3 << 20)
    monkeypatch.setattr(os, "fdatasync", watched)
    nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], heard.append, compress=compress)
    unsynced, syncs = 0, 0
    for i, what in enumerate(heard):
        if isinstance(what, int):
            unsynced += what
            assert unsynced < (3 << 20) + (2 << 20)
        else:
            assert Path(what).parent == tmp_path and heard[i + 1] == 0
            unsynced, syncs = 0, syncs + 1
    assert syncs >= 2 and heard[-1] == 0, "also before the last one"
