"""Copies from a device into replica memory, and the memory that is pinned for them."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from gemini_hpc.train.device import cuda, host_copy
from gemini_hpc.train.device.host_copy import HostCopies
from gemini_hpc.train.device.memory import TensorSlot
from gemini_hpc.train.device.pins import Pins
from gemini_hpc.train.state import encode

from .fake_device import FakeEvent
from .fake_gpu import LiveDevice
from .test_checkpointer import capture_of


def everything(tensor: torch.Tensor) -> bool:
    """Is on the device."""
    return True


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each piece."""
    monkeypatch.setattr(host_copy, "PIECE_BYTES", 1000)
    pieces: list[int] = []
    cut = host_copy._cut_pieces

    def noted(into: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for pair in cut(into, source):
            pieces.append(pair[1].nbytes)
            yield pair

    monkeypatch.setattr(host_copy, "_cut_pieces", noted)
    yield pieces


def test_everything_comes_in_pieces(copied: list[int]) -> None:
    grid = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    sources = [
        torch.randn(2500, dtype=torch.float64),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0),
        torch.randn(33, 77).to(torch.bfloat16),
        torch.rand(4001) > 0.5,
        grid[:, 10:60],  # not in one run of memory
        torch.randn(300, dtype=torch.complex64),
    ]
    targets = [torch.zeros_like(s, memory_format=torch.contiguous_format) for s in sources]
    copies = HostCopies(LiveDevice(1, 1), everything)
    copies.bring(copies.record_mark(), zip(targets, sources, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
    assert sum(copied) == sum(s.nbytes for s in sources)
    assert sorted(copied)[-1] == sources[5].nbytes and sorted(copied)[-2] == 1000


def test_nothing_is_copied_before_the_device_has_come_to_step() -> None:
    copies = HostCopies(LiveDevice(2, 1), everything)
    ready = FakeEvent(time.monotonic)
    source, into = torch.ones(10), torch.zeros(10)
    thread = threading.Thread(target=copies.bring, args=(ready, [(into, source)]))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive() and not into.any()
    source.fill_(2)
    ready.reach()
    thread.join(5.0)
    assert not thread.is_alive() and bool((into == 2).all())


class Memory:
    """Which mappings are pinned."""

    def __init__(self, room: int) -> None:
        self.room, self.pinned = room, set[int]()

    def pin(self, memory: torch.Tensor) -> Any:
        if len(self.pinned) >= self.room:
            raise RuntimeError("too much is locked")
        at = memory.data_ptr()
        assert at not in self.pinned
        self.pinned.add(at)
        return SimpleNamespace(release=lambda: self.pinned.remove(at))


def slots(count: int) -> list[TensorSlot]:
    return [cast(TensorSlot, SimpleNamespace(bytes=torch.zeros(8))) for _ in range(count)]


def test_a_slot_is_pinned_once_and_released_when_it_is_out_of_use() -> None:
    memory, told = Memory(4), list[str]()
    pins, old, new = Pins(memory.pin, told.append), slots(2), slots(2)
    assert pins.add(old) and pins.add(old) and len(memory.pinned) == 2
    assert pins.add(new) and len(memory.pinned) == 4
    pins.release_others([*old, *new])
    assert len(memory.pinned) == 4
    pins.release_others(new)
    assert memory.pinned == {slot.bytes.data_ptr() for slot in new}
    pins.close()
    pins.close()
    assert not memory.pinned and not told


def test_what_cannot_be_pinned_is_told_once_and_not_tried_again() -> None:
    memory, told = Memory(1), list[str]()
    pins, some = Pins(memory.pin, told.append), slots(2)
    assert not pins.add(some) and not pins.add(some)
    assert told == [pins.problem] == ["too much is locked"]
    assert pins.add(some[:1]), "it is pinned"
    memory.room = 9
    assert not pins.add(some[1:])
    pins.close()
    assert not memory.pinned


def test_small_tensors_on_a_device_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the training does after `step()` is not in them, though they come to the host when it has long gone on."""
    monkeypatch.setattr(host_copy, "create_copies", lambda device: HostCopies(LiveDevice(4, 1), everything))
    model = torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture, tree, area = capture_of(model, optimizer)
    model(torch.randn(4, 30))
    at_step = encode.encode(tree.capture_small({}))
    packed = tree.pack_small({}, [], 1, defers=capture.defers)
    assert packed.gaps is not None and len(packed.data) == len(encode.encode({**tree.capture_small({}), "late": []}))
    assert not torch.is_nonzero(encode.decode(packed.data)["buffers"]["model.1.num_batches_tracked"])
    job = capture.begin_job(1, packed.data, False, packed.gaps)
    model(torch.randn(4, 30))
    capture.copy(job, 0, area)
    small = encode.decode(bytes(job.small))
    assert small.pop("late") == [] and encode.encode(small) == at_step
    assert not job.gaps


def test_what_is_put_in_later_is_what_is_encoded_at_once() -> None:
    state = {
        "a": [torch.arange(5), torch.tensor(2.5), torch.empty(0, 3)],
        "b": (torch.randn(3, 4).to(torch.bfloat16), {"t": torch.tensor([True, False])}, 1, "text"),
        "c": torch.randn(4, 4).t(),
        "d": torch.randn(3, dtype=torch.complex64).conj(),
        "e": {"numpy": np.ones(3)},
    }
    data, gaps = encode.encode_around(state, everything)
    assert gaps is not None and gaps.content.numel() == sum(size for _, size in gaps.places)
    assert data != encode.encode(state)
    gaps.fill(gaps.content)
    assert data == encode.encode(state)
    assert encode.encode_around(state, lambda tensor: False) == (encode.encode(state), None)


@pytest.mark.parametrize(
    ("limit", "told"), [(64 << 10, "out of memory (ulimit -l: 64 KiB may be locked)"), (-1, "out of memory")]
)
def test_memory_that_cuda_may_not_lock_is_told_with_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit: int, told: str
) -> None:
    """And nothing more is tried; CUDA's error is not left to the training's next call."""
    asked: list[int] = []

    def register(at: int, size_bytes: int, flags: int) -> int:
        asked.append(size_bytes)
        return 2

    def remembered(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    runtime = SimpleNamespace(cudaHostRegister=register, cudaGetErrorString=lambda _: "out of memory")
    monkeypatch.setattr(cuda, "_cuda", SimpleNamespace(cudart=lambda: runtime))
    monkeypatch.setattr(cuda, "_allow_any_thread", nullcontext)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    memory, said = slots(2), list[str]()
    monkeypatch.setattr(torch, "zeros", remembered)
    pins = Pins(lambda bytes_: cuda.Pinned(bytes_, 0), said.append)
    assert not pins.add(memory) and not pins.add(memory)
    assert len(asked) == 1 and said == [f"CUDA could not pin {asked[0]} bytes of replica memory: {told}"]
    assert pins.problem == said[0]
