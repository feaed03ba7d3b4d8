"""What one node has stored of a version on the tier: in a manifest there, and from agent to agent."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.wire.bounds import Bytes, Count

Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
FileName = Annotated[str, msgspec.Meta(pattern=r"\Anode-[0-9]{4,7}\.h5\Z")]


class Stored(msgspec.Struct, frozen=True):
    """One rank's shard in a file. bytes: size of its slot; used: what of it counts; digest: xxh3_128 (hex) of those
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
