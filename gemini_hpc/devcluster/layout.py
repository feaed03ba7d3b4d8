"""The paths of a cluster's files with its records, and the paths inside that it hides behind its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.files import replace_file

ROOT = Path("/var/lib/gemini-devcluster")
# neutral paths inside, because the real environment may lie below a user's 0700 home
INSIDE = Path("/opt/gemini-hpc")
INSIDE_PYTHON = INSIDE / "venv" / "bin" / "python"
SETTINGS = Path("/etc/gemini-hpc")
# Every process of a cluster carries this variable, so that strays are found even without a record.
MARKER = "GEMINI_DEVCLUSTER"
ROLE = "GEMINI_DEVCLUSTER_ROLE"
CONTROLLER, BUILD = "controller", "build"

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
T = TypeVar("T")


class ClusterFiles:
    """The files of the cluster `name`, all below one root-owned directory, at the same path inside.

    Attributes:
        directory: The directory of all files.
        lock: The lock file.
        record: The record of `bring_up`'s arguments (`ClusterRecord`).
        outer: The outer init's pid and start time, which the init writes before anything else.
        nodes: The directory of the nodes' records.
        etc: The directory of the cluster's own files of /etc.
        slurm_etc: The directory of Slurm's configuration files.
        slurm_conf: The file slurm.conf.
        slurmdbd_conf: The file slurmdbd.conf.
        settings: The directory of gemini.toml.
        log: The directory of the log files.
        home: The directory of the users' homes.
        spool: The directory of slurmd's spools, one for each node. As on a disk, they outlive a power cut.
        state: The directory StateSaveLocation of slurmctld.
        controller: The state directory of the gemini controller service.
        controller_pid: The controller service's pid file.
        munge: The directory of MUNGE's key and logs.
        database: MariaDB's data directory.
        site: The directory of the copied site files.
        opt: The directory that is seen as `INSIDE`.
    """

    def __init__(self, name: str) -> None:
        """Check the name. Raises `DevclusterError` for one that is not valid."""
        if not _NAME.fullmatch(name):
            raise DevclusterError(
                f"cluster name {name!r} is not valid: use a lower-case letter, then up to 30 lower-case "
                "letters, digits or hyphens"
            )
        self.name = name
        self.directory = ROOT / name
        self.lock = ROOT / f".{name}.lock"
        self.record = self.directory / "cluster.json"
        self.outer = self.directory / "outer.json"
        self.nodes = self.directory / "nodes"
        self.etc = self.directory / "etc"
        self.slurm_etc = self.etc / "slurm"
        self.slurm_conf = self.slurm_etc / "slurm.conf"
        self.slurmdbd_conf = self.slurm_etc / "slurmdbd.conf"
        self.settings = self.etc / "gemini-hpc"
        self.log = self.directory / "log"
        self.home = self.directory / "home"
        self.spool = self.directory / "spool"
        self.state = self.directory / "state"
        self.controller = self.directory / "controller"
        self.controller_pid = self.directory / "controller.pid"
        self.munge = self.directory / "munge"
        self.database = self.directory / "database"
        self.site = self.directory / "site"
        self.opt = self.directory / "opt"

    def locate_node_record(self, node: str) -> Path:
        """Return the path of a node's record."""
        return self.nodes / f"{node}.json"

    def locate_tmp(self, node: str) -> Path:
        """Return the path of a node's /tmp. As on a disk, it outlives a power cut."""
        return self.nodes / f"{node}.tmp"

    def locate_boot_id(self, node: str) -> Path:
        """Return the path of a node's boot id."""
        return self.nodes / f"{node}.boot_id"


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


def save_record(path: Path, record: msgspec.Struct) -> None:
    """Write a record in one step."""
    replace_file(str(path), msgspec.json.encode(record) + b"\n")


def load_record(path: Path, kind: type[T]) -> T | None:
    """Return the record in a file, None if the file is missing or incomplete."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def load_cluster(layout: ClusterFiles) -> ClusterRecord:
    """Return the record of a cluster. Raises `DevclusterError` if there is none."""
    if (found := load_record(layout.record, ClusterRecord)) is None:
        raise DevclusterError(f"cluster {layout.name} never came up completely: take it down and start it again")
    return found


def read_rate(layout: ClusterFiles, node: str) -> str | None:
    """Return the recorded limit of a node's link, None if there is none."""
    known = load_record(layout.locate_node_record(node), NodeRecord)
    return known.rate if known else None
