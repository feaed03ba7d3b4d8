"""The persistent tier's files: writing and reading them against the bare file system, torch.save's and DCP's.

One node's file of one rank's state, by the process that does it for an agent, from memory and back; beside it a file
of as many bytes written (or read) in one go into the same directory, synced (the page cache dropped before reading).
Ratios are of rates: ours / bare. A disk may be quicker at first and then held to a rate, so each run has both twice,
bare, ours, ours, bare, and each second run the other way round.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench import MeasureError, Options
from benchmarks.rows import Row, median_row
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import ShardManifest
from gemini_hpc.format.shard_manifest import TensorRow as Tensor
from gemini_hpc.format.slot_header import SlotLayout, pack_header
from gemini_hpc.tier import orders, version
from gemini_hpc.wire.stored import NodeFile

RUNS = 7
TENSORS = 16
STRIDE = 8 << 20
STAMP = Stamp(1, 1)


class Slot:
    """A complete slot of one rank, random numbers in it."""

    def __init__(self, state_bytes: int) -> None:
        count = state_bytes // 4 // TENSORS
        rows = tuple(Tensor(f"model.layer{i}.weight", "float32", (count,), True, "cpu") for i in range(TENSORS))
        manifest = ShardManifest(
            0, 1, rows, shard_manifest.place_boxes(rows, [(i, (0,), (count,)) for i in range(TENSORS)])
        )
        packed = shard_manifest.pack(manifest)
        layout = SlotLayout.plan(len(packed), manifest.count_tensor_bytes(), 4096)
        self.fd, self.bytes, self.used = os.memfd_create("slot"), layout.total, layout.small_offset
        os.ftruncate(self.fd, layout.total)
        self.view = memoryview(mmap.mmap(self.fd, layout.total))
        dice = np.random.default_rng(1)
        count = manifest.count_tensor_bytes() // 4
        area = np.frombuffer(self.view, dtype=np.float32, count=count, offset=layout.tensor_offset)
        for at in range(0, len(area), 1 << 22):
            area[at : at + (1 << 22)] = dice.random(len(area[at : at + (1 << 22)]), dtype=np.float32)
        self.view[:4096] = pack_header(layout, 0, STAMP, 0, 1)
        self.view[layout.manifest_offset : layout.manifest_offset + len(packed)] = packed
        self.digest = digest_bytes(self.view[: self.used])


def _order(order: orders.Order, fd: int) -> Any:
    argv = [sys.executable, "-m", "gemini_hpc.tier.worker", str(os.getpid())]
    done = subprocess.run(
        argv, input=orders.encode(order) + b"\n", stdout=subprocess.PIPE, pass_fds=(fd,), check=True
    )
    answer = orders.answer_decoder.decode(done.stdout.splitlines()[-1])
    if isinstance(answer, orders.Failed):
        raise MeasureError(answer.reason)
    return answer


def _bare_write(slot: Slot, path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for at in range(0, slot.used, STRIDE):
        os.write(fd, slot.view[at : min(slot.used, at + STRIDE)])
    os.fsync(fd)
    os.close(fd)


def _bare_read(path: Path, into: memoryview) -> None:
    fd, at = os.open(path, os.O_RDONLY), 0
    while count := os.preadv(fd, [into[at : at + STRIDE]], at):
        at += count
    os.close(fd)


def forget(where: Path) -> None:
    """Nothing of these files is in the page cache any more."""
    os.sync()
    for path in [where, *where.rglob("*")] if where.is_dir() else [where]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _timed(what: Callable[[], Any]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def measure(options: Options) -> list[Row]:
    """Rows of writing and reading."""
    runs = options.count(RUNS)
    slot = Slot(options.state_bytes)
    place = Path(tempfile.mkdtemp(prefix="gemini-tier-", dir="/var/tmp"))
    seconds: dict[str, list[float]] = {}
    try:
        for run in range(runs):
            options.progress.say("tier", f"run {run + 1} of {runs}")
            for name, took_s in _one(run, slot, place).items():
                seconds.setdefault(name, []).append(took_s)
    finally:
        shutil.rmtree(place)
        os.close(slot.fd)
    return _rows(seconds, slot.used)


def _alternating(run: int, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Mean seconds of two ways that take turns."""
    first, second = list(ways) if run % 2 else list(ways)[::-1]
    took: dict[str, list[float]] = {name: [] for name in ways}
    for name in (first, second, second, first):
        took[name].append(ways[name]())
    return {name: statistics.mean(values) for name, values in took.items()}


class _Place:
    """A directory on the disk that is measured, and what has been saved there."""

    def __init__(self, slot: Slot, path: Path) -> None:
        self.slot, self.path = slot, path
        self.bare, self.saved, self.dcp = path / "bare", path / "saved.pt", path / "dcp"
        self.files: list[NodeFile] = []

    @property
    def version(self) -> Path:
        return self.path / "gemini-1" / "default" / version.format_name(STAMP)

    def write_bare(self) -> float:
        self.bare.unlink(missing_ok=True)
        return _timed(lambda: _bare_write(self.slot, self.bare))

    def write(self) -> float:
        shutil.rmtree(self.path / "gemini-1", ignore_errors=True)
        slot = self.slot
        source = orders.Source(slot.fd, 0, 0, slot.bytes, slot.used, slot.digest)
        order = orders.Write(str(self.path), 1, "default", STAMP, 0, (source,))
        return _timed(lambda: self.files.append(_order(order, slot.fd).file))

    def finish(self) -> float:
        order = orders.Finish(str(self.path), 1, "default", STAMP, 1, (self.files[-1],))
        return _timed(lambda: _order(order, self.slot.fd))

    def read_bare(self, into: memoryview) -> float:
        forget(self.bare)
        return _timed(lambda: _bare_read(self.bare, into))

    def read(self, fd: int) -> float:
        forget(self.version)
        stored = self.files[-1].shards[0]
        order = orders.Read(str(self.path), 1, "default", STAMP, 0, fd, self.slot.used, stored.digest)
        return _timed(lambda: _order(order, fd))

    def clear(self) -> None:
        for path in (self.bare, self.saved):
            path.unlink()
        shutil.rmtree(self.dcp)
        shutil.rmtree(self.path / "gemini-1")


def _one(run: int, slot: Slot, path: Path) -> dict[str, float]:
    import torch
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    place = _Place(slot, path)
    took = _alternating(run, {"bare write": place.write_bare, "write": place.write})
    took["finish"] = place.finish()
    each = (slot.used - 4096) // 4 // TENSORS
    tensors = {
        f"t{i}": torch.frombuffer(slot.view, dtype=torch.float32, count=each, offset=4096 + 4 * each * i)
        for i in range(TENSORS)
    }

    def save() -> None:
        torch.save(tensors, place.saved)
        os.sync()

    took["torch.save"] = _timed(save)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        took["DCP save"] = _timed(
            lambda: state_dict_saver.save(tensors, storage_writer=FileSystemWriter(place.dcp), no_dist=True)
        )
    took |= _reading(run, place, tensors)
    place.clear()
    return took


def _reading(run: int, place: _Place, tensors: dict[str, Any]) -> dict[str, float]:
    import torch
    from torch.distributed.checkpoint import state_dict_loader

    into = os.memfd_create("into")
    try:
        os.ftruncate(into, place.slot.bytes)
        memory = memoryview(mmap.mmap(into, place.slot.bytes))
        # Its pages are there.
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, place.slot.bytes)
        ways = {"bare read": lambda: place.read_bare(memory), "read": lambda: place.read(into)}
        took = _alternating(run, ways)
        forget(place.saved)
        took["torch.load"] = _timed(lambda: torch.load(place.saved, weights_only=True))
        forget(place.dcp)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            empty = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            took["DCP load"] = _timed(
                lambda: state_dict_loader.load(empty, checkpoint_id=str(place.dcp), no_dist=True)
            )
    finally:
        os.close(into)
    return took


def _rows(seconds: dict[str, list[float]], used: int) -> list[Row]:
    def ratio(ours: str, bare: str) -> list[float]:
        return [b / o for o, b in zip(seconds[ours], seconds[bare], strict=True)]

    def others(*names: str) -> dict[str, float]:
        return {name: statistics.median(seconds[name]) for name in names}

    size = f"{used / 1e9:.2g} GB"
    drain = f"rate of writing a node's file, {size}, synced, from its order to its answer / of bare writing, synced"
    restore = f"rate of reading a rank's state back, {size}, the same, page cache dropped / of bare reading"
    return [
        median_row("tier.drain_ratio", drain, "x", ratio("write", "bare write"), limit=0.8, at_least=True),
        median_row("tier.restore_ratio", restore, "x", ratio("read", "bare read"), limit=0.8, at_least=True),
        median_row(
            "tier.write_s",
            f"writing {size}",
            "s",
            seconds["write"],
            peers=others("bare write", "torch.save", "DCP save"),
            baseline="bare write",
        ),
        median_row("tier.finish_s", "index and manifest, once a version", "s", seconds["finish"]),
        median_row(
            "tier.read_s",
            f"reading {size}",
            "s",
            seconds["read"],
            peers=others("bare read", "torch.load", "DCP load"),
            baseline="bare read",
        ),
    ]
