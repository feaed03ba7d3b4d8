"""The contract of a transport: versions of a shard go from an `Outbox` to the `Inbox` at the other end.

One version travels as: head ->, <- accepted or not, chunks in order ->, digest ->. All calls block their thread
(never the training's) with the GIL released, and raise `LinkBroken` when the other end is gone; a link that broke
stays broken. Each box is used by one thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch


class LinkBroken(ConnectionError):
    """The other end is gone, or does not speak the protocol."""


class Head(NamedTuple):
    """What comes: version, bytes of it, size of the slot that it needs."""

    version: int
    used_bytes: int
    total_bytes: int


class Pending(Protocol):
    """A chunk on its way."""

    def wait(self) -> None:
        """Return when the chunk's memory may be changed again. Raises LinkBroken."""


class Outbox(ABC):
    """The sending end of a link to one rank."""

    @abstractmethod
    def offer(self, head: Head) -> bool:
        """Called first for every version. True: the other end waits for its chunks; False: it skips this one."""

    @abstractmethod
    def send(self, chunk: torch.Tensor) -> Pending:
        """Called for each chunk (bytes, contiguous), in order, after an accepted offer; the chunk must not change
        until the result's `wait` has returned."""

    @abstractmethod
    def finish(self, digest: str) -> None:
        """Called after the last chunk with the digest (32 hex digits) of all of them."""

    @abstractmethod
    def bye(self) -> None:
        """Called once, between versions, when nothing more will come."""


class Inbox(ABC):
    """The receiving end of a link from one rank."""

    @abstractmethod
    def next(self) -> Head | None:
        """Wait for the next version, for as long as it takes. None: nothing more will come."""

    @abstractmethod
    def answer(self, accept: bool) -> None:
        """Called once after each `next`."""

    @abstractmethod
    def receive(self, into: torch.Tensor, chunk_bytes: int) -> None:
        """Called after a positive answer: fill `into` (exactly `used_bytes`) chunk by chunk. On return all bytes are
        there. The sender uses the same chunk_bytes."""

    @abstractmethod
    def digest(self) -> str:
        """Called last: the digest made at source."""


class Transport(ABC):
    """All links of one rank."""

    @abstractmethod
    def outbox(self, rank: int) -> Outbox:
        """The link to a rank; called once for each."""

    @abstractmethod
    def inbox(self, rank: int) -> Inbox:
        """The link from a rank; called once for each."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make every blocked and later call raise LinkBroken soon. From any thread, also more than once; called when
        the process ends or the checkpointer gives up."""
