"""`gemini-hpc export`: what it writes is read by the other programs' own functions, and what goes wrong is told."""

from __future__ import annotations

import datetime
import enum
import io
import os
import pwd
import subprocess
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tier.places import version_directory
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from gemini_hpc.cli import main
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import ShardManifest
from gemini_hpc.format.slot_header import SlotLayout, pack_header
from gemini_hpc.mpi.arrays import Arrays, Part
from gemini_hpc.slurm import client as slurm_client
from gemini_hpc.tier import nodefile, publish, version
from gemini_hpc.tier.shards import ParsedSlot
from gemini_hpc.train.state import encode, full_state
from gemini_hpc.train.state.tree import Stateful, StateTree

ROOT = Path(__file__).parents[2]
FORMATS = ("safetensors", "torch", "dcp")
Told = pytest.CaptureFixture[str]


# ---- versions, made by hand ----------------------------------------------------------------------------


def shard(manifest: ShardManifest, fill: Callable[[memoryview], object], small: bytes, stamp: Stamp) -> ParsedSlot:
    """A complete slot. fill: writes its tensor area."""
    packed = shard_manifest.pack(manifest)
    layout = SlotLayout.plan(len(packed), manifest.count_tensor_bytes(), len(small))
    memory = memoryview(bytearray(layout.total))
    memory[:4096] = pack_header(layout, len(small), stamp, manifest.rank, manifest.world)
    memory[layout.manifest_offset : layout.manifest_offset + len(packed)] = packed
    fill(memory[layout.tensor_offset : layout.tensor_offset + layout.tensor_bytes])
    memory[layout.small_offset : layout.small_offset + len(small)] = small
    return ParsedSlot.parse(memory, len(memory))


def store(tier: Path, shards: list[ParsedSlot], job: int = 7, training_name: str = "default") -> Path:
    """A whole version of these ranks, each on a node of its own."""
    stamp = shards[0].header.stamp
    tier.mkdir(exist_ok=True)
    where = version_directory(tier, job, training_name, stamp)
    files = []
    for rank, one in enumerate(shards):
        kept = [(one, rank, digest_bytes(one.view[: one.header.used_bytes]))]
        files.append(nodefile.write(where, version.format_node_file(rank), kept, lambda count: None))
    manifest = version.VersionManifest(job, training_name, stamp, len(shards), 1e9, tuple(files))
    Path(where, version.MANIFEST).write_bytes(version.pack(manifest))
    return Path(where)


def train(tree: StateTree) -> ParsedSlot:
    """What one process alone leaves of a training, as its checkpointer captures it."""
    leaves, odd = tree.find_leaves()
    described = [tree.describe(leaf, 1)[0] for leaf in leaves]
    boxes = [(number, (0,) * len(row.shape), row.shape) for number, row in enumerate(described)]
    manifest = ShardManifest(
        0, 1, tuple(described), shard_manifest.place_boxes(tuple(described), boxes), dict(tree.aliases)
    )

    def fill(area: memoryview) -> None:
        for piece in manifest.pieces:
            data = leaves[piece.row].tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            area[piece.start : piece.start + data.numel()] = data.numpy().tobytes()

    return shard(manifest, fill, bytes(tree.pack_small(odd, [], 1).data), Stamp(1, 4))


def model(width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))


def version_of(
    tier: Path,
    number: int = 4,
    training_name: str = "default",
    width: int = 8,
    stateful: Mapping[str, Stateful] | None = None,
) -> Path:
    """A version of a small training without an optimizer's steps."""
    net = model(width)
    tree = StateTree(net, [torch.optim.SGD(net.parameters(), lr=0.1)], stateful or {}, {})
    one = train(tree)
    one.view[:4096] = pack_header(one.header.layout, one.header.small_bytes, Stamp(1, number), 0, 1)
    return store(tier, [ParsedSlot.parse(one.view, len(one.view))], training_name=training_name)


def export(*argv: object) -> int:
    return main.main(["export", *map(str, argv)])


def told(capsys: Told) -> str:
    """The one line on stderr."""
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("gemini-hpc export: ")


def load_dcp(path: Path) -> dict[str, torch.Tensor]:
    reader = FileSystemReader(path)
    known = reader.read_metadata().state_dict_metadata
    found = {
        key: torch.empty(about.size, dtype=about.properties.dtype)
        for key, about in known.items()
        if isinstance(about, TensorStorageMetadata)
    }
    state_dict_loader.load(found, storage_reader=reader, no_dist=True)
    return found


# ---- what is written -----------------------------------------------------------------------------------


def mpi(rank: int, given: Mapping[str, Any], world: int = 2) -> ParsedSlot:
    arrays = Arrays(given, rank, world)
    return shard(arrays.manifest, arrays.store, b"", Stamp(1, 4))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_mpi_program_has_its_arrays_by_name(tmp_path: Path) -> None:
    """Two ranks' parts of `T` overlap by a row."""
    full, own = np.arange(40.0).reshape(8, 5), [np.arange(3) + rank for rank in range(2)]
    parts = [Part(full[:5].copy(), (0, 0), (8, 5)), Part(full[4:].copy(), (4, 0), (8, 5))]
    where = store(tmp_path / "tier", [mpi(rank, {"T": parts[rank], "own": own[rank]}) for rank in range(2)])
    load: dict[str, Callable[[Path], Any]] = {"safetensors": load_file, "torch": torch.load, "dcp": load_dcp}
    for form in FORMATS:
        assert export(where, "--format", form, "-o", tmp_path / form) == 0, form
        found = load[form](tmp_path / form)
        assert {name: value.tolist() for name, value in found.items()} == {
            "T": full.tolist(),
            "rank0:own": own[0].tolist(),
            "rank1:own": own[1].tolist(),
        }, form


def test_parts_that_leave_a_gap_are_no_whole(tmp_path: Path, capsys: Told) -> None:
    """Beside rows 0 to 4 of 8; the second time there are as many elements as the array has, those of row 3 twice."""
    for begin, end in ((5, 8), (3, 7)):
        parts = [Part(np.ones((b - a, 5)), (a, 0), (8, 5)) for a, b in ((0, 4), (begin, end))]
        where = store(tmp_path / f"tier-{begin}", [mpi(rank, {"T": part}) for rank, part in enumerate(parts)])
        assert export(where, "--format", "torch", "-o", tmp_path / "out") == 1, begin
        assert "T is not whole: 35 of 40 elements" in told(capsys), begin


class Held:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


class Colour(enum.Enum):
    RED = 1


UTC = datetime.UTC
DAY = datetime.date(2026, 2, 3)
VALUES: list[tuple[Any, Any]] = [  # as captured, as exported
    (None, None), (True, True), (3, 3), (-(1 << 70), -(1 << 70)), (0.1, 0.1), (1 + 2j, 1 + 2j), ("é", "é"),
    (1 << 5000, hex(1 << 5000)), (b"ab", [97, 98]), (b"", []), (bytearray(b"a"), [97]),
    (io.BytesIO(b"a"), [97]),
    ([1, b"a"], [1, [97]]), ((1, (2,)), (1, (2,))), (torch.Size([2, 3]), (2, 3)), (range(1, 7, 2), [1, 3, 5]),
    (deque([1, 2], 3), [1, 2]), ({"a": {1: 2}}, {"a": {1: 2}}), (OrderedDict(a=1), {"a": 1}),
    (Counter("aab"), {"a": 2, "b": 1}), (Namespace(lr=0.5), {"lr": 0.5}), ({3, 1}, [1, 3]), (frozenset({"a"}), ["a"]),
    (encode.DTensorPart(torch.ones(2), (4,), "(Shard(dim=0),)"), ([1.0, 1.0], (4,), "(Shard(dim=0),)")),
    (torch.float32, torch.float32), (torch.device("cpu"), torch.device("cpu")),
    (datetime.datetime(2026, 2, 3, 4, tzinfo=UTC), "2026-02-03T04:00:00+00:00"), (DAY, "2026-02-03"),
    (datetime.timedelta(seconds=90), 90.0), (torch.ones(2), [1.0, 1.0]),
    (np.float64(0.5), 0.5), (np.int8(3), 3), (np.str_("a"), "a"), (np.bytes_(b"a"), [97]), (np.bool_(True), True),
    (np.datetime64("2026-02-03"), "2026-02-03"), (np.timedelta64(5, "s"), "5 seconds"), (np.longdouble(0.5), "0.5"),
    (np.array([1, 2], ">i4"), [1, 2]), (np.array([["a", "b"]]), [["a", "b"]]), (np.array([b"a"]), [[97]]),
    (np.array(["2026-02-03", "NaT"], "M8[D]"), ["2026-02-03", "NaT"]), (np.array([5], "m8[s]"), ["5 seconds"]),
    (np.array([0.5], np.longdouble), ["0.5"]), (np.array(7), 7), (np.zeros((0, 2)), []),
    ({(1, "a"): 1, b"k": 2, np.int64(5): 3, DAY: 4, 1 << 5000: 5},
     {(1, "a"): 1, b"k": 2, 5: 3, "datetime.date(2026, 2, 3)": 4, hex(1 << 5000): 5}),
    ({Colour.RED: [Colour.RED]}, {f"{__name__}.Colour.RED": [f"{__name__}.Colour.RED"]}),
]  # fmt: skip


def plainly(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(plainly(item) for item in value)
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_whatever_can_be_captured_is_loaded_without_running_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {type(value) for value, _ in VALUES} >= set(encode._EXACT) - {encode.Lifted}, (
        "each type that the encoder takes, but what is put back before"
    )
    generator = torch.Generator().manual_seed(3)
    state = {**{str(number): value for number, (value, _) in enumerate(VALUES)}, "generator": generator}
    where = version_of(tmp_path / "tier", stateful={"held": Held(state)})
    monkeypatch.setattr(encode, "_find_enum_class", lambda name: None)  # this program has not the training's classes
    assert export(where, "--format", "torch", "-o", tmp_path / "out") == 0
    found = torch.load(tmp_path / "out", weights_only=True)["stateful"]["held"]
    assert torch.equal(found.pop("generator"), generator.get_state())
    for number, (_, wanted) in enumerate(VALUES):
        assert plainly(found[str(number)]) == wanted
        assert type(plainly(found[str(number)])) is type(wanted)
    assert export(where, "--format", "dcp", "-o", tmp_path / "dcp") == 0


def test_groups_and_odd_state_are_plain_too(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=np.float64(0.5))
    optimizer.param_groups[0]["since"] = DAY
    first = next(net.parameters())
    optimizer.state[first]["seen"] = {2, 1}
    where = store(tmp_path / "tier", [train(StateTree(net, [optimizer], {}, {}))])
    assert export(where, "--format", "torch", "-o", tmp_path / "out") == 0
    found = torch.load(tmp_path / "out", weights_only=True)["optimizer"]
    assert (found["param_groups"][0]["lr"], found["param_groups"][0]["since"]) == (0.5, "2026-02-03")
    assert found["state"]["0.weight"]["seen"] == [1, 2]


def two_groups(seed: int, named: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Weights, which come last, decay; biases do not."""
    torch.manual_seed(seed)
    net = model()
    named_params = [[(n, p) if named else p for n, p in net.named_parameters() if (p.ndim > 1) == w] for w in (0, 1)]
    groups = [{"params": named_params[0], "weight_decay": 0.0}, {"params": named_params[1], "lr": 0.5}]
    return net, torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)


@pytest.mark.parametrize("named", [False, True])
def test_torch_loads_the_groups(tmp_path: Path, named: bool) -> None:
    net, optimizer = two_groups(1, named)
    tree = StateTree(net, [optimizer], {}, {})
    for _ in range(2):
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    where = store(tmp_path / "tier", [train(tree)])
    assert export(where, "--format", "torch", "-o", tmp_path / "out") == 0
    for other in (False, True):
        found = torch.load(tmp_path / "out", weights_only=True)
        fresh, its = two_groups(2, named)
        fresh.load_state_dict(found["model"])
        if other:
            its.load_state_dict(found["optimizer"])
        else:
            set_optimizer_state_dict(fresh, its, found["optimizer"])
        wanted, have = optimizer.state_dict(), its.state_dict()
        assert have["param_groups"] == wanted["param_groups"]
        assert have["state"].keys() == wanted["state"].keys()
        for number, values in wanted["state"].items():
            assert all(torch.equal(have["state"][number][name], value) for name, value in values.items())
        assert all(
            torch.equal(a, b) for a, b in zip(net.state_dict().values(), fresh.state_dict().values(), strict=True)
        )


def test_the_names_follow_the_groups(tmp_path: Path) -> None:
    """They are kept from one version to the next, as long as no group has other parameters."""
    net, optimizer = two_groups(1, named=False)
    tree = StateTree(net, [optimizer], {}, {})
    first = tree.capture_small({})["members"]
    assert tree.capture_small({})["members"][0] is first[0]
    groups = optimizer.param_groups
    groups[0]["params"][0], groups[1]["params"][0] = groups[1]["params"][0], groups[0]["params"][0]
    where = store(tmp_path / "tier", [train(tree)])
    found = full_state.as_state(
        full_state.read_whole(str(where), version.parse((where / version.MANIFEST).read_bytes()))
    )
    assert [group["params"][0] for group in found["optimizer"]["param_groups"]] == ["0.weight", "0.bias"]


def test_a_version_of_before_has_no_names(tmp_path: Path) -> None:
    where = version_of(tmp_path / "tier")
    found = full_state.read_whole(str(where), version.parse((where / version.MANIFEST).read_bytes()))
    del found.small["members"]
    (group,) = full_state.as_state(found)["optimizer"]["param_groups"]
    assert group["lr"] == 0.1 and "params" not in group
    net = model()
    StateTree(net, [torch.optim.SGD(net.parameters(), lr=0.2)], {}, {}).restore_small(found.small)


class Turned(torch.nn.Module):
    """Buffers that `state_dict` leaves out, as rotary embeddings have, beside one that it has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.inner[0].register_buffer("inv_freq", torch.randn(3), persistent=False)
        self.register_buffer("none", None, persistent=False)
        self.register_buffer("scale", torch.randn(2))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_state_dict_leaves_out_is_left_out(tmp_path: Path) -> None:
    """A strict load takes all of it; here it comes back, elsewhere it is made by the model."""
    net = Turned(1)
    tree = StateTree(net, [torch.optim.SGD(net.parameters())], {}, {"teacher": Turned(3)})
    where = store(tmp_path / "tier", [train(tree)])
    for form in FORMATS:
        out, again = tmp_path / form, Turned(2)
        assert export(where, "--format", form, "-o", out) == 0, form
        if form == "torch":
            found = torch.load(out, weights_only=True)["model"]
        else:
            flat = load_file(out) if form == "safetensors" else load_dcp(out)
            found = {name.removeprefix("model."): t for name, t in flat.items() if name.startswith("model.")}
        if form == "safetensors":
            assert not [name for name in flat if "inv_freq" in name] and "extra.teacher.scale" in flat
        again.load_state_dict(found)
        both = zip(net.state_dict().values(), again.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in both), form
    other = Turned(4)
    StateTree(other, [torch.optim.SGD(other.parameters())], {}, {"teacher": Turned(5)}).restore_small(
        tree.capture_small({})
    )
    for kept, back in zip(net.buffers(), other.buffers(), strict=True):
        assert torch.equal(kept, back)


# ---- where it is written -------------------------------------------------------------------------------


def test_nothing_is_made_in_a_directory_that_is_not_there(tmp_path: Path, capsys: Told) -> None:
    where = version_of(tmp_path / "tier")
    for form in FORMATS:
        assert export(where, "--format", form, "-o", tmp_path / "no" / "out") == 1, form
        assert f"{tmp_path}/no/out" in told(capsys)
        assert not (tmp_path / "no").exists(), form


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, capsys: Told) -> None:
    where = version_of(tmp_path / "tier", width=10000)
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", full], check=True)
    try:
        for form in FORMATS:
            assert export(where, "--format", form, "-o", full / "out") == 1, form
            assert told(capsys) == f"{full}/out cannot be written: the file system is full"
            assert os.listdir(full) == [], form
    finally:
        subprocess.run(["umount", full], check=True)


@pytest.mark.parametrize("form", FORMATS)
def test_all_is_on_disk_before_it_has_its_name(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    where = version_of(tmp_path / "tier")
    out, said, fsync, rename = tmp_path / "out", list[str](), os.fsync, os.rename

    def synced(fd: int) -> None:
        said.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def renamed(old: str, new: str) -> None:
        said.append(f"to {new}")
        files = [old, *(str(path) for path in Path(old).rglob("*") if not path.name.startswith(".metadata"))]
        assert set(files) <= set(said)
        rename(old, new)

    monkeypatch.setattr(publish, "os", SimpleNamespace(**{**vars(os), "rename": renamed, "fsync": synced}))
    monkeypatch.setattr(os, "fsync", synced)
    assert export(where, "--format", form, "-o", out) == 0
    assert said[-2:] == [f"to {out}", str(tmp_path)]
    assert sorted(os.listdir(tmp_path)) == ["out", "tier"]
    assert [str(warning.message) for warning in recwarn] == []


def test_what_is_there_stays(tmp_path: Path, capsys: Told) -> None:
    (tmp_path / "out").write_text("mine")
    assert export(version_of(tmp_path / "tier"), "--format", "torch", "-o", tmp_path / "out") == 1
    assert "already exists" in told(capsys)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_type_that_safetensors_has_not(tmp_path: Path, capsys: Told) -> None:
    where = store(tmp_path / "tier", [mpi(0, {"z": np.ones(3, np.complex128)}, 1)])
    assert export(where, "--format", "safetensors", "-o", tmp_path / "out") == 1
    assert told(capsys).endswith("safetensors does not support torch.complex128: choose another format")
    assert os.listdir(tmp_path) == ["tier"]


# ---- what is meant -------------------------------------------------------------------------------------


def test_a_damaged_version_is_passed_over(tmp_path: Path, capsys: Told) -> None:
    tier, out = tmp_path / "tier", tmp_path / "out"
    older, newer = version_of(tier, 4), version_of(tier, 5)
    (newer / version.MANIFEST).write_bytes((newer / version.MANIFEST).read_bytes()[:100])
    assert export(tier, "--format", "torch", "-o", out) == 0
    shown, said = capsys.readouterr()
    assert shown.startswith("version 4 of job 7")
    assert said == f"gemini-hpc export: skipped: {newer}/manifest.json: Input data was truncated\n"
    out.unlink()
    for asked in ((newer,), (tier, "--version", 5)):
        assert export(*asked, "--format", "torch", "-o", out) == 1
        assert f"{newer}/manifest.json: Input data was truncated" in told(capsys)
    (older / version.MANIFEST).unlink()
    assert export(tier, "--format", "torch", "-o", out) == 1
    assert told(capsys) == (
        f"{tier}/gemini-7/default: has no whole version; {newer}/manifest.json: Input data was truncated"
    )


def test_what_does_not_fit_is_told(tmp_path: Path, capsys: Told) -> None:
    tier = tmp_path / "tier"
    where = version_of(tier)
    version_of(tier, 4, "evaluation")
    other = f"{where} is of training default, and --training says nope: leave one of them out"
    sentences = {
        (tier,): f"{tier}/gemini-7: wanted one training there, found default, evaluation; name the one you want",
        (tier, "--training", "nope"): f"{tier}/gemini-7: has no training nope; its trainings: default, evaluation",
        (
            where,
            "--training",
            "nope",
        ): f"{where} is of training default, and --training says nope: leave one of them out",
        (where.parent, "--training", "nope"): other,
        (where, "--version", 5): f"{where} is version 4, and --version says 5: leave one of them out",
        (where.parent, "--version", 5): f"{where.parent}: has no whole version 5",
        (where / "manifest.json",): f"{where}/manifest.json: not a directory",
        (tmp_path / "nothing",): f"{tmp_path}/nothing: no such directory",
        ("12345678901",): "12345678901: no such directory",
        (7, "--tier", tmp_path): f"{tmp_path}/gemini-7: no such directory",
    }
    for asked, sentence in sentences.items():
        assert export(*asked, "--format", "torch", "-o", tmp_path / "out") == 1
        assert told(capsys) == sentence
    assert export(where, "--training", "default", "--version", 4, "--format", "torch", "-o", tmp_path / "out") == 0


def test_a_nodes_file_is_missing_or_cut(tmp_path: Path, capsys: Told) -> None:
    where = version_of(tmp_path / "tier")
    file = where / "node-0000.h5"
    file.write_bytes(file.read_bytes()[:1000])
    assert export(where, "--format", "torch", "-o", tmp_path / "out") == 1
    assert told(capsys).startswith(f"{file} cannot be read: ")
    file.unlink()
    assert export(where, "--format", "torch", "-o", tmp_path / "out") == 1
    assert told(capsys) == f"{file} is missing, and this version needs it: choose another version"


def test_a_job_by_its_number(tmp_path: Path, capsys: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the site's tier, and an array's task by the number that Slurm has for it."""
    user = tmp_path / pwd.getpwuid(os.getuid()).pw_name
    version_of(user)
    settings = tmp_path / "gemini.toml"
    settings.write_text("")
    asked = ("--format", "torch", "--config", settings, "-o")
    assert export(7, *asked, tmp_path / "none") == 1
    assert "job 7: its tier is not known" in told(capsys)
    settings.write_text(f'tier = "{tmp_path}/{{user}}"\n')
    assert export(7, *asked, tmp_path / "out") == 0
    assert "version 4 of job 7" in capsys.readouterr().out
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho '2|3|2|'; echo '5|1|2|'; echo '6|2|2|'\n")
    squeue.chmod(0o755)
    monkeypatch.setattr(slurm_client, "find_tool", lambda name: str(squeue))
    assert export("2_2", *asked, tmp_path / "array") == 1
    assert told(capsys) == f"{user}/gemini-6: no such directory"
