"""Versions on the tier: whole or not there."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.shard_manifest import TensorRow
from gemini_hpc.tier import index, names, nodefile, publish, retention, scratch, version
from gemini_hpc.tier.version import VersionManifest

from . import slots
from .places import version_directory

ROWS = (
    TensorRow("model.w", "float32", (6, 4), True, "cpu"),
    TensorRow("model.half", "bfloat16", (4,), True, "cpu"),
    TensorRow("model.scalar", "float64", (), True, "cpu"),
    TensorRow("mine", "int32", (2,), False, "cpu"),
)


def save(tier: Path, stamp: Stamp, *, world: int = 2, serial: int = 1, manifest: bool = True) -> list[slots.Slot]:
    """A version of two ranks, on two nodes."""
    where = version_directory(tier, 9, "default", stamp)
    files, made = [], []
    for rank in range(world):
        boxes = [(0, (3 * rank, 0), (3, 4)), (3, (0,), (2,))]
        boxes += [(1, (0,), (4,)), (2, (), ())] if rank == 0 else []
        slot = slots.make(rank, world, ROWS, boxes, stamp=stamp, seed=stamp.version)
        name, shards = version.format_node_file(rank), [(slot.shard(), rank, slot.digest())]
        files.append(nodefile.write(where, name, shards, lambda _: None))
        made.append(slot)
    whole = VersionManifest(9, "default", stamp, world, 1e9, tuple(files), serial)
    if manifest:
        index.write(where, whole, lambda _: None)
        with publish.replace_file(where, version.MANIFEST) as path:
            Path(path).write_bytes(version.pack(whole))
    return made


def test_the_index_shows_each_tensor_as_one(tmp_path: Path) -> None:
    made = save(tmp_path, Stamp(1, 5))
    where = tmp_path / "gemini-9/default" / version.format_name(Stamp(1, 5))
    with h5py.File(where / "index.h5") as shown:
        w = b"".join(slot.values["model.w", (3 * rank, 0)] for rank, slot in enumerate(made))
        assert shown["tensors/model.w"][...].tobytes() == w
        assert shown["tensors/model.w"].dtype == np.float32
        assert shown["tensors/model.half"].shape == (4,)
        assert shown["tensors/model.scalar"][()].tobytes() == made[0].values["model.scalar", ()]
        assert shown["ranks/1/mine"][...].tobytes() == made[1].values["mine", (0,)]
        assert dict(shown.attrs)["version"] == 5
    os.rename(tmp_path / "gemini-9", tmp_path / "moved")  # nothing in it names the directory
    with h5py.File(tmp_path / "moved/default" / version.format_name(Stamp(1, 5)) / "index.h5") as shown:
        assert shown["tensors/model.w"][...].tobytes() == w


def test_a_manifest_names_its_training_by_the_key_of_earlier_releases() -> None:
    """Files outlive a renaming in the code: the key is not the attribute's name."""
    shard = {"rank": 0, "home": 0, "bytes": 4096, "used": 4096, "digest": "0" * 32}
    files = [{"name": "node-0000.h5", "bytes": 9000, "shards": [shard]}]
    stored = {
        "job": 9,
        "set": "critic",
        "stamp": [1, 5],
        "world": 1,
        "time": 1e9,
        "files": files,
        "format": version.FORMAT,
    }
    manifest = version.parse(json.dumps(stored).encode())
    assert manifest.training == "critic"
    assert json.loads(version.pack(manifest))["set"] == "critic"


def test_a_version_is_whole_with_its_manifest(tmp_path: Path) -> None:
    save(tmp_path, Stamp(1, 5))
    save(tmp_path, Stamp(2, 3), manifest=False)
    above = str(tmp_path / "gemini-9/default")
    assert version.list_stamps(above) == [Stamp(2, 3), Stamp(1, 5)]
    assert [m.stamp for m in version.list_whole(above)] == [(1, 5)]
    assert version.read(above, Stamp(2, 3)) is None
    assert version.list_trainings(str(tmp_path / "gemini-9")) == ["default"]
    assert version.list_trainings(str(tmp_path / "gemini-10")) == []


def test_a_damaged_manifest_is_passed_over(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, Stamp(1, number))
    above = tmp_path / "gemini-9/default"
    newest, second = (above / version.format_name(Stamp(1, n)) / version.MANIFEST for n in (3, 2))
    newest.write_bytes(newest.read_bytes()[:-30])
    second.write_bytes(
        (above / version.format_name(Stamp(1, 1)) / version.MANIFEST).read_bytes()
    )  # of another version
    assert [m.stamp for m in version.list_whole(str(above))] == [(1, 1)]


def test_a_manifest_that_lacks_a_rank_is_none() -> None:
    manifest = VersionManifest(1, "default", Stamp(0, 1), 2, 0.0, ())
    with pytest.raises(ValueError, match="2 ranks"):
        version.pack(manifest)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_garbage_is_no_manifest(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"manifest\.json"):
        version.parse(data)


@given(st.integers(0, (1 << 23) - 1), st.integers(0, (1 << 40) - 1))
def test_names_are_stamps(epoch: int, number: int) -> None:
    assert version.parse_name(version.format_name(Stamp(epoch, number))) == Stamp(epoch, number)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, (1 << 40) - 1)), unique=True))
def test_names_sort_as_stamps(found: list[tuple[int, int]]) -> None:
    ordered = sorted(Stamp(*pair) for pair in found)
    assert sorted(map(version.format_name, ordered)) == list(map(version.format_name, ordered))


def test_retention(tmp_path: Path) -> None:
    for number in range(1, 6):
        save(tmp_path, Stamp(1, number))
    above = tmp_path / "gemini-9/default"
    save(tmp_path, Stamp(1, 9), manifest=False)
    save(tmp_path, Stamp(1, 7), manifest=False)
    (above / version.format_name(Stamp(1, 2)) / version.KEPT).touch()
    gone = retention.clean(str(above), 2, before=Stamp(1, 9))
    assert gone == [Stamp(1, 1), Stamp(1, 3), Stamp(1, 7)]
    assert version.list_stamps(str(above)) == [Stamp(1, n) for n in (9, 5, 4, 2)]
    assert [n for n in range(1, 9) if retention.is_permanent(n, 3)] == [3, 6]
    assert not retention.is_permanent(1, 0)


def _fails(monkeypatch: pytest.MonkeyPatch, call: str, name: str) -> None:
    """From now on the file system fails for files of this name."""
    real = getattr(os, call)

    def failing(path: str, *args: int, **options: int) -> object:
        if str(path).endswith(f"/{name}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **options)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("name", [version.MANIFEST, version.KEPT, version.REJECTED])
def test_what_a_file_system_that_fails_does_not_show_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No whole version is taken for a half one, no kept one for another, no rejected one for a good one."""
    for number in range(1, 5):
        save(tmp_path, Stamp(1, number))
    above = tmp_path / "gemini-9/default"
    for kept in (1, 2):
        names.keep_version(str(above / version.format_name(Stamp(1, kept))), {f"best-{kept}": kept})
    with monkeypatch.context() as patch:
        _fails(patch, "lstat", name)
        with pytest.raises(OSError, match="Input/output"):
            retention.clean(str(above), 1)
    assert version.list_stamps(str(above)) == [Stamp(1, number) for number in (4, 3, 2, 1)]


def test_what_is_half_removed_is_no_version_and_goes_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who still writes there can make it whole."""
    save(tmp_path, Stamp(1, 1), manifest=False)
    save(tmp_path, Stamp(1, 2))
    above = tmp_path / "gemini-9/default"
    with monkeypatch.context() as patch:
        _fails(patch, "unlink", version.format_node_file(1))
        patch.setattr(scratch, "remove", lambda path: os.unlink(f"{path}/{version.format_node_file(1)}"))
        with pytest.raises(OSError, match="Input/output"):
            retention.clean(str(above), 2)
    assert version.list_stamps(str(above)) == [Stamp(1, 2)]
    with (
        pytest.raises(FileNotFoundError),
        publish.replace_file(str(above / version.format_name(Stamp(1, 1))), version.MANIFEST),
    ):
        pass
    retention.clean(str(above), 2)
    assert os.listdir(above) == [version.format_name(Stamp(1, 2))]


def test_names_that_cannot_be_read_are_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, Stamp(1, 1))
    where = str(tmp_path / "gemini-9/default" / version.format_name(Stamp(1, 1)))
    names.keep_version(where, {"best": 1})
    with monkeypatch.context() as patch:
        _fails(patch, "open", version.KEPT)
        with pytest.raises(OSError, match="Input/output"):
            names.keep_version(where, {"other": 1})
        with pytest.raises(OSError, match="Input/output"):
            names.find_training_names(os.path.dirname(where))
    names.keep_version(where, {"other": 1})
    assert names.read_version_names(where) == {"best": 1, "other": 1}


def test_a_tier_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(publish.TierError, match="not there"):
        version_directory(tmp_path / "gone", 1, "default", Stamp(0, 1))
    assert not (tmp_path / "gone").exists()
