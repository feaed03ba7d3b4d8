"""What one node has stored of a version on the tier: in a manifest there, and from agent to agent."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import Bytes, Count, SetName, TierInterval
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.tier_interval import AUTO

Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
FileName = Annotated[str, msgspec.Meta(pattern=r"\Anode-[0-9]{4,7}\.h5\Z")]


Reason = Annotated[str, msgspec.Meta(max_length=300)]
_DIRECTORY = r"(/[ !#-&(-\[\]-_a-~]{0,4095})?"  # printable ASCII without quotes, as the prolog takes it
Directory = Annotated[str, msgspec.Meta(pattern=rf"\A{_DIRECTORY}\Z")]
_MOST_S = 604800


class Tier(msgspec.Struct, frozen=True):
    """Where a program wants its versions saved, and how often. As --gemini-tier and --gemini-tier-interval, which go
    before it.

    Args:
        directory: absolute, seen by all nodes; "": none is named.
        interval_s: the agents save a version every so many seconds; 0: as often as the site says; "auto": so that
            saving and losing cost least (`core.tier_interval`).

    Raises:
        ValueError: for what cannot be.
    """

    directory: Directory = ""
    interval_s: TierInterval = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(_DIRECTORY, self.directory):
            raise ValueError(f"tier is {self.directory!r}: wanted an absolute path of printable ASCII without quotes")
        if isinstance(self.interval_s, str):
            if self.interval_s != AUTO:
                raise ValueError(
                    f"a tier's interval_s is {self.interval_s[:40]!r}: wanted 1 to {_MOST_S}, or {AUTO!r}"
                )
        elif self.interval_s and not 1 <= self.interval_s <= _MOST_S:
            raise ValueError(f"a tier's interval_s is {self.interval_s:g}: wanted 1 to {_MOST_S}, or {AUTO!r}")
        if self.interval_s and not self.directory:
            raise ValueError("a tier has an interval_s, but no directory")

    @classmethod
    def of(cls, tier: str | Tier) -> Tier:
        """From what a user gives: a directory alone, or both. Raises ValueError."""
        found = cls(tier) if isinstance(tier, str) else tier
        if isinstance(found.interval_s, str):
            return found
        return msgspec.structs.replace(found, interval_s=round(found.interval_s))


class Rejection(msgspec.Struct, frozen=True, order=True):
    """Versions of a set that are not to be loaded any more: from the one that ranks had loaded, `low`, to all that
    came of it, `high`. reason: theirs; fresh: if nothing else is left, the training may begin anew."""

    set: SetName
    low: Stamp
    high: Stamp
    reason: Reason = ""
    fresh: bool = False

    def covers(self, name: str, stamp: Stamp) -> bool:
        """Whether this version of a set is one of them."""
        return name == self.set and self.low <= stamp <= self.high

    @property
    def sentence(self) -> str:
        """For the user."""
        return f"version {self.low[1]} was rejected: {self.reason}" if self.low[1] else f"all: {self.reason}"


class Stored(msgspec.Struct, frozen=True):
    """One rank's shard in a file. bytes: size of its slot; used: what of it counts; digest (`core.digest`): of those
    bytes, with zeros between the areas and the tensors."""

    rank: Count
    home: Count
    bytes: Bytes
    used: Bytes
    digest: Digest


class NodeFile(msgspec.Struct, frozen=True):
    """One node's file."""

    name: FileName
    bytes: Bytes
    shards: tuple[Stored, ...]
