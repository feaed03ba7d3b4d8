"""Chunks through gloo's point-to-point operations, over a process group of our own."""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from gemini_hpc.core.chunks import cut
from gemini_hpc.train.transport.base import Head, Inbox, LinkBroken, Outbox, Pending, Transport

_HEAD = struct.Struct("<8sQQQQ")
_MAGIC = b"GEMCHNK\x01"
_BYE, _VERSION = 0, 1
_HEAD_TAG, _ANSWER_TAG, _CHUNK_TAG, _DIGEST_TAG = 1, 2, 3, 4
# A receive may rightly wait for as long as an iteration takes, and gloo closes the link when one times out.
_FOREVER = timedelta(days=1)


def _sockets() -> dict[int, int]:
    """Descriptor -> inode of all sockets of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


class _Work:
    def __init__(self, work: dist.Work, keep: torch.Tensor) -> None:
        self._work, self._keep = work, keep

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LinkBroken(str(error).split(". This is typically")[0]) from None


class _Link:
    def __init__(self, transport: GlooTransport, rank: int) -> None:
        self._transport, self._rank = transport, rank

    def _start(self, sending: bool, tensor: torch.Tensor, tag: int) -> _Work:
        backend = self._transport.backend
        if self._transport.interrupted:
            raise LinkBroken("interrupted")
        try:
            # straight to the backend: hooks on the training's collectives must not see this traffic
            work = (backend.send if sending else backend.recv)([tensor], self._rank, tag)
        except RuntimeError as error:
            raise LinkBroken(str(error).split(". This is typically")[0]) from None
        return _Work(work, tensor)

    def _send(self, data: bytes, tag: int) -> None:
        self._start(True, torch.frombuffer(bytearray(data), dtype=torch.uint8), tag).wait()

    def _receive(self, count: int, tag: int) -> bytes:
        tensor = torch.empty(count, dtype=torch.uint8)
        self._start(False, tensor, tag).wait()
        return tensor.numpy().tobytes()


class _GlooOutbox(_Link, Outbox):
    def offer(self, head: Head) -> bool:
        self._send(_HEAD.pack(_MAGIC, _VERSION, *head), _HEAD_TAG)
        return self._receive(1, _ANSWER_TAG) == b"\x01"

    def send(self, chunk: torch.Tensor) -> Pending:
        return self._start(True, chunk, _CHUNK_TAG)

    def finish(self, digest: str) -> None:
        self._send(bytes.fromhex(digest), _DIGEST_TAG)

    def bye(self) -> None:
        self._send(_HEAD.pack(_MAGIC, _BYE, 0, 0, 0), _HEAD_TAG)


class _GlooInbox(_Link, Inbox):
    def next(self) -> Head | None:
        magic, kind, version, used, total = _HEAD.unpack(self._receive(_HEAD.size, _HEAD_TAG))
        if magic != _MAGIC or kind not in (_BYE, _VERSION) or used > total:
            raise LinkBroken(f"rank {self._rank} sent something that is no head of a version")
        return Head(version, used, total) if kind == _VERSION else None

    def answer(self, accept: bool) -> None:
        self._send(b"\x01" if accept else b"\x00", _ANSWER_TAG)

    def receive(self, into: torch.Tensor, chunk_bytes: int) -> None:
        ahead: _Work | None = None
        for offset, length in cut(into.numel(), chunk_bytes):
            work = self._start(False, into[offset : offset + length], _CHUNK_TAG)
            if ahead is not None:
                ahead.wait()
            ahead = work
        if ahead is not None:
            ahead.wait()

    def digest(self) -> str:
        return self._receive(16, _DIGEST_TAG).hex()


class GlooTransport(Transport):
    """Links over gloo. Making one is collective over the default process group; `group` also serves for small
    collectives of the main thread."""

    def __init__(self) -> None:
        before = _sockets()
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_FOREVER)
        self.backend = self.group._get_backend(torch.device("cpu"))
        self._sockets = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}
        self.interrupted = False

    def outbox(self, rank: int) -> Outbox:
        return _GlooOutbox(self, rank)

    def inbox(self, rank: int) -> Inbox:
        return _GlooInbox(self, rank)

    def interrupt(self) -> None:
        """gloo has no call that ends a blocked receive (abort and shutdown do not), and a thread that is blocked in
        one when Python exits aborts the process. Shutting its connections down does end it."""
        self.interrupted = True
        for fd, inode in self._sockets.items():
            with suppress(OSError):
                if os.fstat(fd).st_ino != inode:
                    continue
                with socket.socket(fileno=os.dup(fd)) as sock:
                    sock.getpeername()  # not the listening one: its shutdown would end the process
                    sock.shutdown(socket.SHUT_RDWR)
