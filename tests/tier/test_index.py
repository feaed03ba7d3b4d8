"""The index shows all that a model has: also its buffers, and its tied parameters by each of their names."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import small_state
from gemini_hpc.format.shard_manifest import TensorRow
from gemini_hpc.tier import index, nodefile
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.train.state import encode
from gemini_hpc.train.state.tree import StateTree

from . import slots
from .places import version_directory


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.randn(3, 2).bfloat16())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.empty(0, 4))
        self(torch.arange(8))

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.embed(tokens)))


def shown(where: Path, made: list[slots.Slot]) -> h5py.File:
    """The index of a version of these ranks, on a node each."""
    directory = version_directory(where, 9, "default", Stamp(3, 12))
    files = []
    for rank, slot in enumerate(made):
        shards = [(slot.shard(), rank, slot.digest())]
        files.append(nodefile.write(directory, f"node-{rank:04d}.h5", shards, lambda _: None))
    index.write(directory, VersionManifest(9, "default", Stamp(3, 12), len(made), 1e9, tuple(files)), lambda _: None)
    return h5py.File(f"{directory}/index.h5")


def test_a_model_s_buffers_and_tied_names(tmp_path: Path) -> None:
    net = Net()
    tree = StateTree(net, [torch.optim.AdamW(net.parameters())], {}, {"teacher": nn.BatchNorm1d(2)})
    leaves, odd = tree.find_leaves()
    rows = tuple(tree.describe(leaf, 1)[0] for leaf in leaves)
    boxes = [(i, (0,) * len(row.shape), row.shape) for i, row in enumerate(rows)]
    slot = slots.make(0, 1, rows, boxes, small=bytes(tree.pack_small(odd, [], 1).data), aliases=tree.aliases)
    with shown(tmp_path, [slot]) as found:
        tensors = found["tensors"]
        wanted = {f"model.{name}" for name in net.state_dict()} | {"extra.teacher.running_mean"}
        assert wanted <= set(tensors)
        for name, buffer in net.named_buffers():
            data = tensors[f"model.{name}"]
            assert data.shape == tuple(buffer.shape) and data.attrs["tensor"] == f"model.{name}"
            assert data.attrs["dtype"] == str(buffer.dtype).removeprefix("torch.")
            assert np.array_equal(data[...].astype(np.float64), buffer.double().numpy())
        assert tensors["model.norm.num_batches_tracked"][()] == 1
        link = tensors.get("model.head.weight", getlink=True)
        assert isinstance(link, h5py.SoftLink) and link.path == "/tensors/model.embed.weight"
        assert tensors["model.head.weight"] == tensors["model.embed.weight"]
        assert tensors["model.head.weight"][...].tobytes() == slot.values["model.embed.weight", (0, 0)]


def test_rank_0_s_buffers_and_each_rank_s_own_ties(tmp_path: Path) -> None:
    rows = (TensorRow("model.mine", "float32", (4,), False, "cpu"),)
    made = [
        slots.make(
            rank,
            2,
            rows,
            [(0, (0,), (4,))],
            small=encode.encode({"rng": 0, "buffers": {"model.seen": torch.full((2,), 7 + rank)}}),
            aliases={"model.a/b": "model.mine", "model.lost": "model.nowhere"},
        )
        for rank in (1, 0)
    ][::-1]
    with shown(tmp_path, made) as found:
        assert found["tensors/model.seen"][...].tolist() == [7, 7]
        assert set(found["tensors"]) == {"model.seen"}
        for rank, slot in enumerate(made):
            assert set(found[f"ranks/{rank}"]) == {"model.mine", "model.a%2Fb"}
            assert found[f"ranks/{rank}/model.a%2Fb"][...].tobytes() == slot.values["model.mine", (0,)]


def test_a_small_state_that_is_no_training_s_is_no_obstacle(tmp_path: Path) -> None:
    for small in (b"", b"another's", encode.encode({"buffers": 5})):
        rows = (TensorRow("x", "float32", (4,), True, "cpu"),)
        with shown(tmp_path, [slots.make(0, 1, rows, [(0, (0,), (4,))], small=small)]) as found:
            assert set(found["tensors"]) == {"x"}, small


class Colour(enum.Enum):
    RED = 1


EVERYTHING = [
    *(None, True, False, -(2**80), 0.5, 1j, "\ud800", b"x", bytearray(b"y"), [1, [2]], (3, (4,)), range(3)),
    *(
        torch.Size([2]),
        collections.deque([1, 2], 3),
        {"a": {1: 2}},
        collections.OrderedDict(b=1),
        argparse.Namespace(a=[1]),
    ),
    *(collections.Counter("aab"), {1, 2}, frozenset({3}), torch.float32, torch.device("cpu"), Colour.RED),
    *(datetime.datetime(2026, 1, 2), datetime.date(2026, 1, 2), datetime.timedelta(1), torch.Generator()),
    *(np.float32(1), np.arange(6).reshape(2, 3), np.empty((0, 3)), torch.tensor(3.5), torch.empty(0, 4)),
    encode.DTensorPart(torch.ones(2), (4,), "(Shard(dim=0),)"),
]


def test_whatever_stands_before_the_buffers() -> None:
    buffers = {"model.a": torch.arange(6).reshape(2, 3), "model.b": torch.tensor(2.0, dtype=torch.bfloat16)}
    small = encode.encode({"rng": EVERYTHING, "more": EVERYTHING[0], "buffers": buffers, "after": EVERYTHING})
    found = small_state.list_buffers(small)
    assert [(row.key, row.dtype, row.shape) for row, _ in found] == [
        ("model.a", "int64", (2, 3)),
        ("model.b", "bfloat16", ()),
    ]
    for (_, data), wanted in zip(found, buffers.values(), strict=True):
        assert bytes(data) == wanted.reshape(-1).view(torch.uint8).numpy().tobytes()
    # What is encoded one day in another way is to be passed over then, too.
    assert {tag for (tag,) in encode._READ} | set(b"X") == small_state.TAGS


@given(st.binary(max_size=60), st.integers(0, 3000))
@settings(max_examples=200, deadline=None)
def test_garbage_is_a_value_error_at_most(garbage: bytes, at: int) -> None:
    small = encode.encode({"rng": EVERYTHING, "buffers": {"model.a": torch.zeros(2)}})
    for data in (garbage, small[:at] + garbage + small[at + len(garbage) :]):
        with suppress(ValueError):
            small_state.list_buffers(data)


def test_a_small_state_that_ends_early_is_none() -> None:
    small = encode.encode({"rng": EVERYTHING[:20], "buffers": {"model.a": torch.zeros(2)}})
    for end in range(1, len(small)):
        with pytest.raises(ValueError, match="ends early"):
            small_state.list_buffers(small[:end])
