"""Links over gloo's point-to-point operations, for what does not go from GPU to GPU.

They have process groups of their own. gloo keeps one connection for each pair of ranks and group, and what is sent
over one waits its turn: also an acknowledgement, and the word that a receive was posted, without which the other end
sends no chunk. Two ranks that hold each other's copies would have these wait behind whole bursts of chunks. So chunks
to a higher rank go over one group, those to a lower rank over another, and in each connection only small messages go
against them.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.nccl.messages import REPLIES, MessageInbox, MessageOutbox
from gemini_hpc.train.state.collectives import own_group
from gemini_hpc.train.transport.base import LinkBroken

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


def _reason(error: RuntimeError) -> str:
    return str(error).split(". This is typically")[0]


class _Work:
    def __init__(self, links: GlooLinks, work: dist.Work, keep: torch.Tensor) -> None:
        self._links, self._work, self._keep = links, work, keep

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LinkBroken(_reason(error)) from None

    def abandon(self) -> None:
        """gloo cannot take a message back, and a connection on which a half-sent one is destroyed carries no others.
        So it stays as it is. Of receives only those of acknowledgements can be left while the connection lives."""
        if not self._links.interrupted:
            self._links.abandoned.append(self)


class GlooLinks:
    """The links of one rank. Making them is collective over the training's ranks, those of `within`. gloo ends the
    process that gets a longer message than it asked for, so the sending end checks the sizes of its chunks."""

    def __init__(self, within: dist.ProcessGroup | None = None) -> None:
        self.interrupted = False
        before = _sockets()
        up, down = own_group(within, _FOREVER), own_group(within, _FOREVER)
        self._up: Any = up._get_backend(torch.device("cpu"))
        self._down: Any = down._get_backend(torch.device("cpu"))
        self._rank = up.rank()
        self._sockets = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}
        self.abandoned: list[_Work] = []

    def outbox(self, rank: int) -> MessageOutbox:
        """The link to a rank; called once for each."""
        return MessageOutbox(self, rank)

    def inbox(self, rank: int) -> MessageInbox:
        """The link from a rank; called once for each."""
        return MessageInbox(self, rank)

    def begin(self, sending: bool, rank: int, tensor: torch.Tensor, tag: int) -> _Work:
        """See `messages.Carrier`."""
        chunks_leave = sending != (tag in REPLIES)  # over the link that the message belongs to
        backend = self._up if chunks_leave == (rank > self._rank) else self._down
        try:
            # straight to the backend: hooks on the training's collectives must not see this traffic
            work = (backend.send if sending else backend.recv)([tensor], rank, tag)
        except RuntimeError as error:
            raise LinkBroken(_reason(error)) from None
        return _Work(self, work, tensor)

    def interrupt(self) -> None:
        """Make every blocked and later call raise LinkBroken soon. From any thread, also more than once.

        gloo has no call that ends a blocked receive (abort and shutdown do not), and a thread that is blocked in one
        when Python exits aborts the process. Shutting its connections down does end it.
        """
        self.interrupted = True
        for fd, inode in self._sockets.items():
            with suppress(OSError):
                if os.fstat(fd).st_ino != inode:
                    continue
                with socket.socket(fileno=os.dup(fd)) as sock:
                    if sock.family not in (socket.AF_INET, socket.AF_INET6):
                        continue  # made by another thread at the same time as the group
                    sock.getpeername()  # not the listening one: its shutdown would end the process
                    sock.shutdown(socket.SHUT_RDWR)
        self.abandoned.clear()
