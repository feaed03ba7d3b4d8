"""The persistent tier's files: writing and reading them against the bare file system, torch.save's and DCP's.

One node's file of one rank's state, by the process that does it for an agent, from memory and back; in turns with a
file of as many bytes written (or read) in one go into the same directory, synced (the page cache dropped before
reading). Ratios are of rates: ours / bare.
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

import msgspec
import numpy as np

from benchmarks.bench import MeasureError, Options
from benchmarks.rows import Row, median_row
from gemini_hpc.core import directory
from gemini_hpc.core.directory import Manifest
from gemini_hpc.core.directory import Row as Tensor
from gemini_hpc.core.manifest import Layout, pack_header
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import orders, version
from gemini_hpc.tier.shards import digest

RUNS = 7
TENSORS = 16
STRIDE = 8 << 20
STAMP = (1, 1)


class Slot:
    """A complete slot of one rank, random numbers in it."""

    def __init__(self, state_bytes: int) -> None:
        count = state_bytes // 4 // TENSORS
        rows = tuple(Tensor(f"model.layer{i}.weight", "float32", (count,), True, "cpu") for i in range(TENSORS))
        manifest = Manifest(0, 1, rows, directory.place(rows, [(i, (0,), (count,)) for i in range(TENSORS)]))
        packed = directory.pack(manifest)
        layout = Layout.plan(len(packed), manifest.tensor_bytes(), 4096)
        self.fd, self.bytes, self.used = os.memfd_create("slot"), layout.total, layout.small_offset
        os.ftruncate(self.fd, layout.total)
        self.view = memoryview(mmap.mmap(self.fd, layout.total))
        dice = np.random.default_rng(1)
        count = manifest.tensor_bytes() // 4
        area = np.frombuffer(self.view, dtype=np.float32, count=count, offset=layout.tensor_offset)
        for at in range(0, len(area), 1 << 22):
            area[at : at + (1 << 22)] = dice.random(len(area[at : at + (1 << 22)]), dtype=np.float32)
        self.view[:4096] = pack_header(layout, 0, Stamp(*STAMP), 0, 1)
        self.view[layout.manifest_offset : layout.manifest_offset + len(packed)] = packed
        self.digest = digest(self.view[: self.used])


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
            for name, took_s in _one(slot, place).items():
                seconds.setdefault(name, []).append(took_s)
    finally:
        shutil.rmtree(place)
        os.close(slot.fd)
    return _rows(seconds, slot.used)


def _one(slot: Slot, place: Path) -> dict[str, float]:
    import torch
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    took: dict[str, float] = {}
    bare, saved, dcp = place / "bare", place / "saved.pt", place / "dcp"
    took["bare write"] = _timed(lambda: _bare_write(slot, bare))
    source = orders.Source(slot.fd, 0, 0, slot.bytes, slot.used, slot.digest)
    write = orders.Write(str(place), 1, "default", STAMP, 0, (source,))
    written: list[Any] = []

    took["write"] = _timed(lambda: written.append(_order(write, slot.fd)))
    finish = orders.Finish(str(place), 1, "default", STAMP, 1, (written[0].file,))
    took["finish"] = _timed(lambda: _order(finish, slot.fd))
    where = place / "gemini-1" / "default" / version.name(Stamp(*STAMP))
    each = (slot.used - 4096) // 4 // TENSORS
    tensors = {
        f"t{i}": torch.frombuffer(slot.view, dtype=torch.float32, count=each, offset=4096 + 4 * each * i)
        for i in range(TENSORS)
    }
    took["torch.save"] = _timed(lambda: (torch.save(tensors, saved), os.sync()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        took["DCP save"] = _timed(
            lambda: state_dict_saver.save(tensors, storage_writer=FileSystemWriter(dcp), no_dist=True)
        )
    for path in (bare, where, saved, dcp):
        forget(path)
    stored = written[0].file.shards[0]
    read = orders.Read(str(place), 1, "default", STAMP, 0, 0, slot.used, stored.digest)
    took |= _reading(slot, bare, saved, dcp, read, tensors)
    for path in (bare, saved):
        path.unlink()
    shutil.rmtree(dcp)
    shutil.rmtree(place / "gemini-1")
    return took


def _reading(
    slot: Slot, bare: Path, saved: Path, dcp: Path, read: orders.Read, tensors: dict[str, Any]
) -> dict[str, float]:
    import torch
    from torch.distributed.checkpoint import state_dict_loader

    took: dict[str, float] = {}
    into = os.memfd_create("into")
    try:
        os.ftruncate(into, slot.bytes)
        memory = memoryview(mmap.mmap(into, slot.bytes))
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, slot.bytes)  # its pages are there
        took["bare read"] = _timed(lambda: _bare_read(bare, memory))
        took["read"] = _timed(lambda: _order(msgspec.structs.replace(read, fd=into), into))
        took["torch.load"] = _timed(lambda: torch.load(saved, weights_only=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            empty = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            took["DCP load"] = _timed(lambda: state_dict_loader.load(empty, checkpoint_id=str(dcp), no_dist=True))
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
