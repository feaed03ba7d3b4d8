"""The contract of a link: versions of a shard go from an `Outbox` to the holder at the other end.

A version travels in these steps:

1. The outbox sends the head.
2. The other end answers that it accepts or refuses the version.
3. The bytes go in order. A `GrantOutbox` is told how many of them may go, and until when.
4. `finish` sends what is left, and then the digest.

All calls block their thread (never the training's) with the GIL released. They raise `LinkBroken` when the other end
is gone or has given up. A broken link stays broken unless the error is `VersionLost`.

Each box is used by one thread only.

The bytes that travel are the leading `used_bytes` bytes of the slot that the agent has assigned to this version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from gemini_hpc.core.ranges import Range
from gemini_hpc.wire.grant_page import Grant, Spell


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
        sizes: Sizes of the chunks in order, where a link announces them; their sum is `sent_bytes`.
        apart: (offset, length) of a stretch of the bytes that travels another way, not over this link. The chunks are
            the bytes before and behind the stretch.
        base: An earlier version since which the ranges `kept` are unchanged (see `GrantOutbox.present`); 0 for no
            such version.
        kept: The ranges that are unchanged since version `base`.
    """

    version: int
    used_bytes: int
    total_bytes: int
    sizes: tuple[int, ...] = ()
    apart: tuple[int, int] = (0, 0)
    base: int = 0
    kept: tuple[Range, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Return the number of bytes that go over the link."""
        return self.used_bytes - self.apart[1]


class Outbox(ABC):
    """The sending end of a link to a rank."""

    @abstractmethod
    def offer(self, head: Head) -> bool:
        """Offer a version, as the first call for every version.

        Returns:
            Whether the other end waits for the bytes. Otherwise it skips this version.
        """

    @abstractmethod
    def finish(self, digest: str) -> None:
        """End a version. On return the other end has all of it.

        Args:
            digest: Digest of the version's bytes (32 hex digits); "" for a `GrantOutbox`, whose agents make it.
        """

    @abstractmethod
    def announce_end(self) -> None:
        """Say goodbye to the other end. Call once, between versions, when no version follows."""


class GrantOutbox(Outbox):
    """The sending end of a link over which the agent sends the bytes, as far as the rank grants it.

    `finish` grants all that is left.

    Attributes:
        present: Ranges of the last offered version that the other end has. Only the bytes between these ranges are
            sent, and counted.
    """

    present: tuple[Range, ...] = ()

    @abstractmethod
    def grant(self, grant: Grant) -> None:
        """Replace the grant: so many bytes of the version may go in all, until then."""

    @abstractmethod
    def withdraw(self) -> None:
        """End the grant: no further byte begins to go."""

    @abstractmethod
    def check(self) -> None:
        """Check, without waiting, that the version under way is not lost.

        Raises:
            LinkBroken: It is.
        """

    @property
    @abstractmethod
    def sent(self) -> int:
        """Return how many bytes of the version have been sent."""

    @property
    @abstractmethod
    def arrived(self) -> int:
        """Return how many bytes of the version have arrived."""

    @property
    @abstractmethod
    def moved_at(self) -> float:
        """Return when a byte was last sent or acknowledged (CLOCK_MONOTONIC, seconds); 0: never."""

    @abstractmethod
    def read_spells(self) -> list[Spell]:
        """Return the times in which bytes were in flight, since the last call."""
