"""Links over gloo's point-to-point operations, for the data that do not go from GPU to GPU.

The links have process groups of their own. gloo keeps one connection for each pair of ranks and group, and messages
on one connection wait for each other. This includes acknowledgements, and gloo's notice that a receive was posted,
without which the other end sends no chunk. Between two ranks that hold each other's copies, these messages would wait
behind whole bursts of chunks.

Chunks to a higher rank therefore use one group, and chunks to a lower rank another. In each connection only small
messages go against the chunks.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.nccl.messages import REPLIES, MessageInbox, MessageOutbox
from gemini_hpc.train.state.collectives import build_own_group
from gemini_hpc.train.transport.base import LinkBroken


def _find_sockets() -> dict[int, int]:
    """Return descriptor -> inode of all sockets of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _describe_error(error: RuntimeError) -> str:
    return str(error).split(". This is typically")[0]


class _Work:
    def __init__(self, links: GlooLinks, work: dist.Work, keep: torch.Tensor) -> None:
        self._links, self._work, self._keep = links, work, keep

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LinkBroken(_describe_error(error)) from None

    def abandon(self) -> None:
        """Keep the message's memory alive for as long as gloo may use it.

        gloo cannot cancel a message, and a connection on which a half-sent message is destroyed carries no others.
        Hence the work is kept as it is. Of receives, only those of acknowledgements can be left while the connection
        lives.
        """
        if not self._links.interrupted:
            self._links.abandoned.append(self)


class GlooLinks:
    """The links of one rank over gloo."""

    def __init__(self, within: dist.ProcessGroup | None = None) -> None:
        """Create the two process groups. Collective over the training's ranks.

        gloo ends a process that gets a longer message than it asked for. The sending end therefore checks the sizes
        of its chunks.

        Args:
            within: Process group of the training's ranks; None: the default group.
        """
        self.interrupted = False
        before = _find_sockets()
        up, down = build_own_group(within), build_own_group(within)
        self._up: Any = up._get_backend(torch.device("cpu"))
        self._down: Any = down._get_backend(torch.device("cpu"))
        self._rank = up.rank()
        self._sockets = {fd: inode for fd, inode in _find_sockets().items() if before.get(fd) != inode}
        self.abandoned: list[_Work] = []

    def build_outbox(self, rank: int) -> MessageOutbox:
        """Create the link to a rank; called once for each."""
        return MessageOutbox(self, rank)

    def build_inbox(self, rank: int) -> MessageInbox:
        """Create the link from a rank; called once for each."""
        return MessageInbox(self, rank)

    def begin_transfer(self, sending: bool, rank: int, tensor: torch.Tensor, tag: int) -> _Work:
        """Begin to send or receive a message, see `messages.Carrier`."""
        chunks_leave = sending != (tag in REPLIES)  # direction of the chunks on this message's link
        backend = self._up if chunks_leave == (rank > self._rank) else self._down
        try:
            # directly to the backend: hooks on the training's collectives must not see this traffic
            work = (backend.send if sending else backend.recv)([tensor], rank, tag)
        except RuntimeError as error:
            raise LinkBroken(_describe_error(error)) from None
        return _Work(self, work, tensor)

    def interrupt(self) -> None:
        """Make every blocked and every later call raise LinkBroken soon. Thread-safe; may be called repeatedly.

        gloo has no call that ends a blocked receive (abort and shutdown do not). A thread that is blocked in a
        receive when Python exits aborts the process. Shutting down the connections ends the receive.
        """
        self.interrupted = True
        for fd, inode in self._sockets.items():
            with suppress(OSError):
                if os.fstat(fd).st_ino != inode:
                    continue
                with socket.socket(fileno=os.dup(fd)) as sock:
                    if sock.family not in (socket.AF_INET, socket.AF_INET6):
                        continue  # another thread's socket, made at the same time as the group
                    sock.getpeername()  # raises for a listening socket, whose shutdown would end the process
                    sock.shutdown(socket.SHUT_RDWR)
        self.abandoned.clear()
