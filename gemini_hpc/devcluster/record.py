"""What is written down about a cluster and its nodes, for later commands to find."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import Layout


class ClusterRecord(msgspec.Struct, frozen=True):
    """Written by `up` at the end: a cluster without it never came up completely."""

    profile: str
    nodes: list[str]
    plugin: bool
    prolog: bool
    epilog: bool


class NodeRecord(msgspec.Struct, frozen=True):
    """`pid` and `start` name the init of the node's last start (see `processes.ProcessId`)."""

    pid: int
    start: int
    rate: str | None = None


def save(path: Path, record: msgspec.Struct) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(record) + b"\n")
    new.rename(path)


def load_cluster(layout: Layout) -> ClusterRecord:
    try:
        return msgspec.json.decode(layout.record.read_bytes(), type=ClusterRecord)
    except (OSError, msgspec.DecodeError):
        raise DevclusterError(
            f"cluster {layout.name} never came up completely: take it down and start it again"
        ) from None


def load_node(layout: Layout, node: str) -> NodeRecord | None:
    try:
        return msgspec.json.decode(layout.node(node).read_bytes(), type=NodeRecord)
    except (OSError, msgspec.DecodeError):
        return None
