"""Ways to save a training's state, for the programs beside this one: ours and what others would do.

All have one face. A training calls `save()` at the end of an iteration and `fence()` before its optimizer changes the
state; `durable()` is true when the last save is complete in the place that this way has for it. Those that write
files sync them before they call them complete (on tmpfs that costs nothing).

`CheckFreq` and `Chunked` follow the descriptions of CheckFreq and TorchSnapshot in their papers and manuals as far as
two cores need it, and share no code with them.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import shutil
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import gemini_hpc as gemini

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from gemini_hpc.train.schedule.traffic import Scheme

CHUNK_BYTES = 8 << 20
FILE_BYTES = 16 << 20
WRITERS = 4
SLICE_S = 0.002  # the emulated compute wakes up as often, in every mode, to see whether the version is safe by now
REST_S = 3.0  # longer than a peer and the agents take to seal what has left this rank
SHM = "/dev/shm"

Tensors = dict[str, torch.Tensor]


class Nothing:
    """No protection."""

    def save(self) -> None:
        """At the end of an iteration; the training waits for it."""

    def fence(self) -> None:
        """Returns when the state may change: the last save has it."""

    def durable(self) -> bool:
        """Whether the last save is where it should be."""
        return True

    def drain(self) -> None:
        """Wait until it is."""

    def close(self) -> None:
        """No more saves for now; returns when the last one has ended."""
        self.drain()


class Off(Nothing):
    """This project, told to save nothing: it goes on counting steps, and keeps what it knows of the traffic."""

    def __init__(self, ckpt: gemini.Checkpointer) -> None:
        self._ckpt = ckpt
        ckpt.scheme = "none"

    def save(self) -> None:
        self._ckpt.step()


class Gemini(Nothing):
    """This project. Its own hook on the optimizer is the fence."""

    def __init__(self, ckpt: gemini.Checkpointer, scheme: Scheme) -> None:
        self._ckpt = ckpt
        ckpt.scheme = scheme

    @property
    def sealed(self) -> tuple[int, int]:
        client = self._ckpt._session.client
        if client is None or client.page is None or not self._ckpt._session.protected:
            raise SystemExit(f"the training is not protected: {self._ckpt.report()['findings']}")
        return client.page.sealed

    def save(self) -> None:
        self._ckpt.step()

    def durable(self) -> bool:
        return self.sealed >= (self._ckpt._session.epoch, self._ckpt.version)

    def rest(self) -> bool:
        """Wait until this rank sends nothing; whether the last version is sealed. It may never be: one that finds the
        version before on its way is skipped, and not on all ranks alike where iterations are short."""
        deadline = time.monotonic() + 60
        until = 0.0
        while not self.durable():
            self._ckpt._engine.pacer.hurry()  # the training waits, and has no traffic in whose spans chunks could go
            now = time.monotonic()
            if now > deadline:
                raise SystemExit(f"the last version is still on its way: {self._ckpt.report()}")
            if not self._ckpt._engine.under_way:
                until = until or now + REST_S
                if now > until:
                    return False
            time.sleep(SLICE_S)
        return True

    def drain(self) -> None:
        self.rest()


class Baseline(Nothing):
    """What anyone would write first: two slots in memory that is there, filled while the training waits, then sent to
    the next rank by a thread over a gloo group of its own. No digest, no agreement, no agent."""

    def __init__(self, tensors: Tensors, rank: int, world: int) -> None:
        self._sources = list(tensors.values())
        total = sum(t.numel() * t.element_size() for t in self._sources)
        own = [torch.zeros(total, dtype=torch.uint8) for _ in range(2)]
        self._slots = [(slot, self._views(slot)) for slot in own]
        self._landing = [torch.zeros(total, dtype=torch.uint8) for _ in range(2)]
        self._to, self._from, self._turn = (rank + 1) % world, (rank - 1) % world, 0
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1)
        self._sent: Future[None] | None = None

    def _views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        views, at = [], 0
        for t in self._sources:
            size = t.numel() * t.element_size()
            views.append(slot[at : at + size].view(t.dtype).view(t.shape))
            at += size
        return views

    def save(self) -> None:
        if self._sent is not None:
            self._sent.result()
        self._turn ^= 1
        slot, views = self._slots[self._turn]
        with torch.no_grad():
            torch._foreach_copy_(views, self._sources)
        self._sent = self._thread.submit(self._send, slot, self._landing[self._turn])

    def _send(self, slot: torch.Tensor, landing: torch.Tensor) -> None:
        for at in range(0, slot.numel(), CHUNK_BYTES):
            works = [
                dist.isend(slot[at : at + CHUNK_BYTES], self._to, group=self._group),
                dist.irecv(landing[at : at + CHUNK_BYTES], self._from, group=self._group),
            ]
            for work in works:
                assert work is not None
                work.wait()

    def durable(self) -> bool:
        return self._sent is None or self._sent.done()

    def drain(self) -> None:
        if self._sent is not None:
            self._sent.result()

    def close(self) -> None:
        self.drain()
        self._thread.shutdown()


def _sync(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class TorchSave(Nothing):
    """torch.save to a file while the training waits; durable on this node only."""

    def __init__(self, tensors: Tensors, rank: int, place: str = SHM) -> None:
        self._tensors, self._path = tensors, f"{place}/bench-{rank}.pt"

    def save(self) -> None:
        torch.save(self._tensors, self._path)
        _sync(self._path)

    def close(self) -> None:
        Path(self._path).unlink(missing_ok=True)


class CheckFreq(Nothing):
    """A snapshot into shared memory that is there, beside the next forward and backward pass; then torch.save of it
    by another process. A save waits while the one before has not ended."""

    def __init__(self, tensors: Tensors, rank: int, place: str) -> None:
        self._sources, self._path = list(tensors.values()), f"{place}/checkfreq-{rank}.pt"
        self._snapshot = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in self._snapshot.values():
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._persist, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._thread = ThreadPoolExecutor(1)
        self._taken: Future[None] | None = None
        self._saving = False

    def save(self) -> None:
        self.drain()
        self._saving = True
        self._taken = self._thread.submit(self._take)

    def _take(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self._snapshot.values()), self._sources)
        self._pipe.send(True)

    def _persist(self, pipe: Connection[bool, bool]) -> None:
        self._pipe.close()
        while pipe.recv():
            torch.save(self._snapshot, self._path)
            _sync(self._path)
            pipe.send(True)

    def fence(self) -> None:
        if self._taken is not None:
            self._taken.result()

    def durable(self) -> bool:
        return not self._saving or self._pipe.poll()

    def drain(self) -> None:
        self.fence()
        if self._saving:
            self._saving = not self._pipe.recv()

    def close(self) -> None:
        self.drain()
        self._pipe.send(False)
        self._process.join()
        self._thread.shutdown()
        Path(self._path).unlink(missing_ok=True)


class Chunked(Nothing):
    """Several threads copy the state into memory that is there while the training waits; then they write it in the
    background, as raw bytes in several files, and a directory of the tensors last."""

    def __init__(self, tensors: Tensors, rank: int, place: str) -> None:
        self._place = Path(place) / f"chunked-{rank}"
        self._place.mkdir(exist_ok=True)
        sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
        self._slab = torch.zeros(sum(sizes.values()), dtype=torch.uint8)
        self._parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in range(WRITERS)]
        self._directory, at = {}, 0
        for name, t in tensors.items():
            view = self._slab[at : at + sizes[name]].view(t.dtype).view(t.shape)
            part = min(WRITERS - 1, at * WRITERS // self._slab.numel())
            self._parts[part][0].append(view)
            self._parts[part][1].append(t)
            self._directory[name] = (str(t.dtype), list(t.shape), at)
            at += sizes[name]
        self._pool = ThreadPoolExecutor(WRITERS)
        self._end = ThreadPoolExecutor(1)
        self._saved: Future[None] | None = None

    def save(self) -> None:
        self.drain()
        list(self._pool.map(self._stage, self._parts))
        starts = range(0, self._slab.numel(), FILE_BYTES)
        self._saved = self._end.submit(self._finish, [self._pool.submit(self._write, at) for at in starts])

    @staticmethod
    def _stage(part: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(*part)

    def _write(self, at: int) -> None:
        with open(self._place / str(at // FILE_BYTES), "wb", buffering=0) as file:
            left = self._slab[at : at + FILE_BYTES].numpy().data
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())

    def _finish(self, writes: Sequence[Future[None]]) -> None:
        for write in writes:
            write.result()
        directory = self._place / "directory.json"
        directory.write_text(json.dumps(self._directory))
        _sync(directory)

    def durable(self) -> bool:
        return self._saved is None or self._saved.done()

    def drain(self) -> None:
        if self._saved is not None:
            self._saved.result()

    def close(self) -> None:
        self.drain()
        self._pool.shutdown()
        self._end.shutdown()
        shutil.rmtree(self._place, ignore_errors=True)


class DcpAsync(Nothing):
    """torch.distributed.checkpoint.async_save with staging in shared memory; durable on this node only."""

    def __init__(self, tensors: Tensors, rank: int, place: str = SHM) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._tensors = {f"rank{rank}.{name}": t for name, t in tensors.items()}
        self._path, self._sync = f"{place}/bench-dcp", place != SHM
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        self._saved: Any = None

    def save(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.drain()
        self._saved = async_save(
            self._tensors,
            storage_writer=FileSystemWriter(self._path, sync_files=self._sync, overwrite=True),
            process_group=self._group,
            async_stager=self._stager,
        )

    def durable(self) -> bool:
        return self._saved is None or bool(self._saved.done())

    def drain(self) -> None:
        if self._saved is not None:
            self._saved.result()

    def close(self) -> None:
        self.drain()
        self._stager.close()
        shutil.rmtree(self._path, ignore_errors=True)


class Remote(Nothing):
    """torch.save to memory while the training waits; a thread sends that to a store (`store.py`), which says when it
    has all of it. What GEMINI's paper calls Strawman and HighFreq; the two differ in how often they save only."""

    def __init__(self, tensors: Tensors, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._tensors = tensors
        self._sock = socket.create_connection((host, int(port)))
        self._thread = ThreadPoolExecutor(1)
        self._saved: Future[None] | None = None

    def save(self) -> None:
        self.drain()
        file = io.BytesIO()
        torch.save(self._tensors, file)
        self._saved = self._thread.submit(self._send, file.getbuffer())

    def _send(self, data: memoryview) -> None:
        self._sock.sendall(struct.pack("<Q", len(data)))
        self._sock.sendall(data)
        if self._sock.recv(1) != b"+":
            raise ConnectionError("the store has gone")

    def durable(self) -> bool:
        return self._saved is None or self._saved.done()

    def drain(self) -> None:
        if self._saved is not None:
            self._saved.result()

    def close(self) -> None:
        self.drain()
        self._thread.shutdown()
        self._sock.close()
