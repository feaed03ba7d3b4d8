"""A node's stored part of a version on the tier, used in manifests and in messages between agents."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from gemini_hpc.core.numbers import Bytes, Count, TierInterval, TrainingName
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.tier_interval import AUTO

Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
FileName = Annotated[str, msgspec.Meta(pattern=r"\Anode-[0-9]{4,7}\.h5\Z")]


Reason = Annotated[str, msgspec.Meta(max_length=300)]
_DIRECTORY = r"(/[ !#-&(-\[\]-_a-~]{0,4095})?"  # printable ASCII without quotes, as the prolog accepts it
Directory = Annotated[str, msgspec.Meta(pattern=rf"\A{_DIRECTORY}\Z")]
_MOST_S = 604800  # a week: the longest interval that a tier may have


class Tier(msgspec.Struct, frozen=True):
    """A program's choice of the directory for its versions, and of the save interval.

    The options --gemini-tier and --gemini-tier-interval mean the same and take precedence.

    Args:
        directory: Absolute path that all nodes see; "": no choice.
        interval_s: Seconds between the agents' saves; 0: the site's setting; "auto": the interval with the least
            total cost of saving and of lost work (`core.tier_interval`).

    Raises:
        ValueError: A value is invalid.
    """

    directory: Directory = ""
    interval_s: TierInterval = 0

    def __post_init__(self) -> None:
        directory: Any = self.directory  # of any type in a program's call
        interval_s: Any = self.interval_s
        if not isinstance(directory, str) or not re.fullmatch(_DIRECTORY, directory):
            wanted = "an absolute path of printable ASCII without quotes, at most 4096 bytes"
            raise ValueError(f"tier is {repr(directory)[:80]}: wanted {wanted}")
        in_range = isinstance(interval_s, int | float) and (interval_s == 0 or 1 <= interval_s <= _MOST_S)
        if interval_s != AUTO and not in_range:
            raise ValueError(f"a tier's interval_s is {repr(interval_s)[:40]}: wanted 1 to {_MOST_S}, or {AUTO!r}")
        if self.interval_s and not self.directory:
            raise ValueError("a tier has an interval_s, but no directory")

    @classmethod
    def from_argument(cls, tier: str | Tier) -> Tier:
        """Return a tier from a user's argument: a directory alone, or a `Tier`.

        Raises:
            TypeError: The argument is neither.
            ValueError: A value is invalid.
        """
        found = cls(tier) if isinstance(tier, str) else tier
        if not isinstance(found, Tier):
            raise TypeError(f"tier is a {type(tier).__name__}, wanted a str or a gemini_hpc.Tier")
        if isinstance(found.interval_s, str):
            return found
        return msgspec.structs.replace(found, interval_s=round(found.interval_s))


class Rejection(msgspec.Struct, frozen=True, order=True):
    """A range of versions of a training that must not be loaded any more.

    Attributes:
        low: Version that the ranks had loaded.
        high: Newest version that derives from it.
        reason: Reason that the ranks gave.
        fresh: The training may begin anew if no other version is left.
    """

    training: TrainingName
    low: Stamp
    high: Stamp
    reason: Reason = ""
    fresh: bool = False

    def covers(self, name: str, stamp: Stamp) -> bool:
        """Return whether this version of a training is in the rejected range."""
        return name == self.training and self.low <= stamp <= self.high

    @property
    def sentence(self) -> str:
        """Return a sentence for the user."""
        return f"version {self.low[1]} was rejected: {self.reason}" if self.low[1] else f"all: {self.reason}"


class Stored(msgspec.Struct, frozen=True):
    """A rank's shard in a file.

    Attributes:
        bytes: Size of its slot.
        used: Number of bytes of the slot that count.
        digest: Digest (`core.digest`) of those bytes, with zeros between the areas and the tensors.
    """

    rank: Count
    home: Count
    bytes: Bytes
    used: Bytes
    digest: Digest


class NodeFile(msgspec.Struct, frozen=True):
    """A node's file on the tier, with the shards in it."""

    name: FileName
    bytes: Bytes
    shards: tuple[Stored, ...]
