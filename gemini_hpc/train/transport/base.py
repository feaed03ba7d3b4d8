"""The contract of a link: versions of a shard go from an `Outbox` to the holder at the other end.

A version travels in these steps:

1. The outbox sends the head.
2. The other end answers that it accepts or refuses the version.
3. The outbox sends the chunks in order. Each is acknowledged when its bytes have arrived.
4. The outbox sends the digest.

All calls block their thread (never the training's) with the GIL released. They raise `LinkBroken` when the other end
is gone or has given up. A broken link stays broken unless the error is `VersionLost`.

Each box is used by one thread only. Another thread may wait for the result of `send`.

The bytes that travel are the leading `used_bytes` bytes of the slot that the agent has assigned to this version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch

from gemini_hpc.core.ranges import Range


class LinkBroken(ConnectionError):
    """The other end is gone or does not speak the protocol."""


class VersionLost(LinkBroken):
    """The version under way does not arrive, but the link heals: the next version may be offered."""


class Head(NamedTuple):
    """The announcement of a version.

    Attributes:
        version: The version.
        used_bytes: Number of bytes of the version.
        total_bytes: Size of the slot that the version needs.
        sizes: Sizes of the chunks in order; their sum is `sent_bytes`. Empty where the outbox is `free`.
        apart: (offset, length) of a stretch of the bytes that travels another way, not over this link. The chunks are
            the bytes before and behind the stretch.
        base: An earlier version since which the ranges `kept` are unchanged (see `Outbox.there`); 0 for no such
            version.
        kept: The ranges that are unchanged since version `base`.
    """

    version: int
    used_bytes: int
    total_bytes: int
    sizes: tuple[int, ...]
    apart: tuple[int, int] = (0, 0)
    base: int = 0
    kept: tuple[Range, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Return the number of bytes that go over the link."""
        return self.used_bytes - self.apart[1]


class Pending(Protocol):
    """A chunk under way."""

    def wait(self) -> None:
        """Wait until the chunk has arrived: the network is free and the chunk's memory may be changed.

        Raises:
            LinkBroken: The link broke.
        """


class Outbox(ABC):
    """The sending end of a link to a rank.

    Attributes:
        free: Chunks may be of any size, announced when they are sent, and the agents make the digest.
        there: Ranges of the last offered version that the other end has. Only the bytes between these ranges are
            sent.
    """

    free = False
    there: tuple[Range, ...] = ()

    @abstractmethod
    def offer(self, head: Head) -> bool:
        """Offer a version, as the first call for every version.

        Returns:
            Whether the other end waits for the chunks. Otherwise it skips this version.
        """

    @abstractmethod
    def send(self, chunk: torch.Tensor) -> Pending:
        """Send the next chunk of an accepted version.

        The chunk must not change until the result's `wait` has returned. Several chunks may be under way; they are
        waited for in order.

        Args:
            chunk: Contiguous bytes, as many as the head announced. Chunks go in order.

        Raises:
            ValueError: The chunk has another size than announced.
        """

    @abstractmethod
    def finish(self, digest: str) -> None:
        """End a version, after its last chunk.

        Args:
            digest: Digest of the version's bytes (32 hex digits); "" where the outbox is `free`.
        """

    @abstractmethod
    def bye(self) -> None:
        """Say goodbye to the other end. Call once, between versions, when no version follows."""
