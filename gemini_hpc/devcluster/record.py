"""Records of a cluster and its nodes, for later commands."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ClusterFiles


class ClusterRecord(msgspec.Struct, frozen=True):
    """The record of a cluster, written at the end of `bring_up`; a cluster without it never started completely."""

    profile: str
    nodes: list[str]
    plugin: bool
    prolog: bool
    epilog: bool


class NodeRecord(msgspec.Struct, frozen=True):
    """The record of a node: `pid` and `start` of the init of its last start (see `processes.ProcessId`)."""

    pid: int
    start: int
    rate: str | None = None


def save(path: Path, record: msgspec.Struct) -> None:
    """Write a record in one step."""
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(record) + b"\n")
    new.rename(path)


def load_cluster(layout: ClusterFiles) -> ClusterRecord:
    """Return the record of a cluster. Raises `DevclusterError` if there is none."""
    try:
        return msgspec.json.decode(layout.record.read_bytes(), type=ClusterRecord)
    except (OSError, msgspec.DecodeError):
        raise DevclusterError(
            f"cluster {layout.name} never came up completely: take it down and start it again"
        ) from None


def load_node(layout: ClusterFiles, node: str) -> NodeRecord | None:
    """Return the record of a node, None if there is none."""
    try:
        return msgspec.json.decode(layout.locate_node_record(node).read_bytes(), type=NodeRecord)
    except (OSError, msgspec.DecodeError):
        return None
