"""The contract of a link: versions of a shard go from an `Outbox` to the holder at the other end.

One version travels as: head ->, <- accepted or not, chunks in order -> (each acknowledged <- when its bytes are
there), digest ->. All calls block their thread (never the training's) with the GIL released, and raise `LinkBroken`
when the other end is gone or has given up; a link that broke stays broken, unless it says `VersionLost`. Each box is
used by one thread only; what `send` returns may be waited for in another.

What travels are the leading `used_bytes` bytes of the slot that the agent has given out for this version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch

from gemini_hpc.core.ranges import Range


class LinkBroken(ConnectionError):
    """The other end is gone, or does not speak the protocol."""


class VersionLost(LinkBroken):
    """The version on its way does not arrive, but the link heals: the next one may be offered."""


class Head(NamedTuple):
    """What comes: version, bytes of it, size of the slot that it needs, and the sizes of its chunks in order (their
    sum is `sent_bytes`; none where the outbox is `free`). apart: (offset, length) of a stretch of its bytes that
    comes another way, and not over this link; the chunks are what is before it and behind it. base: a version since
    which the ranges `kept` are the same (see `Outbox.there`); 0: none."""

    version: int
    used_bytes: int
    total_bytes: int
    sizes: tuple[int, ...]
    apart: tuple[int, int] = (0, 0)
    base: int = 0
    kept: tuple[Range, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Over the link."""
        return self.used_bytes - self.apart[1]


class Pending(Protocol):
    """A chunk on its way."""

    def wait(self) -> None:
        """Return when the chunk is at the other end: the network is free, its memory may be changed. Raises
        LinkBroken."""


class Outbox(ABC):
    """The sending end of a link to one rank. free: chunks may be of any size, said when they go, and the agents make
    the digest. there: of the version that was offered last, what the other end has: only what is between these ranges
    is sent."""

    free = False
    there: tuple[Range, ...] = ()

    @abstractmethod
    def offer(self, head: Head) -> bool:
        """Called first for every version. True: the other end waits for its chunks; False: it skips this one."""

    @abstractmethod
    def send(self, chunk: torch.Tensor) -> Pending:
        """Called for each chunk (bytes, contiguous, as large as the head said), in order, after an accepted offer;
        the chunk must not change until the result's `wait` has returned. Several may be on their way; they are waited
        for in order. Raises ValueError for a chunk of another size than announced."""

    @abstractmethod
    def finish(self, digest: str) -> None:
        """End a version, after its last chunk, with its bytes' digest (32 hex digits), "" where `free`."""

    @abstractmethod
    def bye(self) -> None:
        """Called once, between versions, when nothing more will come."""
