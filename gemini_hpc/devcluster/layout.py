"""Where a cluster keeps its files, and which paths it hides behind its own inside its namespaces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gemini_hpc.devcluster.errors import DevclusterError

ROOT = Path("/var/lib/gemini-devcluster")
# Neutral paths inside: the real environment may lie below somebody's 0700 home.
INSIDE = Path("/opt/gemini-hpc")
INSIDE_PYTHON = INSIDE / "venv" / "bin" / "python"
SETTINGS = Path("/etc/gemini-hpc")
# Every process of a cluster carries this variable, so that strays are found even without a record.
MARKER = "GEMINI_DEVCLUSTER"
ROLE = "GEMINI_DEVCLUSTER_ROLE"
CONTROLLER, BUILD = "controller", "build"

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


@dataclass(frozen=True)
class Layout:
    """The files of the cluster `name`; all below one root-owned directory, at the same path inside."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise DevclusterError(
                f"cluster name {self.name!r} is not valid: use a lower-case letter, then up to 30 lower-case "
                "letters, digits or hyphens"
            )

    @property
    def directory(self) -> Path:
        return ROOT / self.name

    @property
    def lock(self) -> Path:
        return ROOT / f".{self.name}.lock"

    @property
    def record(self) -> Path:
        """What `up` was asked for (`record.ClusterRecord`)."""
        return self.directory / "cluster.json"

    @property
    def outer(self) -> Path:
        """Pid and start time of the outer init, written by itself before it does anything else."""
        return self.directory / "outer.json"

    @property
    def nodes(self) -> Path:
        return self.directory / "nodes"

    def node(self, node: str) -> Path:
        return self.nodes / f"{node}.json"

    def boot_id(self, node: str) -> Path:
        return self.nodes / f"{node}.boot_id"

    @property
    def etc(self) -> Path:
        return self.directory / "etc"

    @property
    def slurm_etc(self) -> Path:
        return self.etc / "slurm"

    @property
    def slurm_conf(self) -> Path:
        return self.slurm_etc / "slurm.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.slurm_etc / "slurmdbd.conf"

    @property
    def settings(self) -> Path:
        return self.etc / "gemini-hpc"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def spool(self) -> Path:
        """A private tmpfs on each node: slurmd forgets everything when the power goes."""
        return self.directory / "spool"

    @property
    def state(self) -> Path:
        """StateSaveLocation."""
        return self.directory / "state"

    @property
    def controller(self) -> Path:
        """The state directory of the gemini controller service."""
        return self.directory / "controller"

    @property
    def controller_pid(self) -> Path:
        return self.directory / "controller.pid"

    @property
    def munge(self) -> Path:
        return self.directory / "munge"

    @property
    def database(self) -> Path:
        """MariaDB's data directory."""
        return self.directory / "database"

    @property
    def site(self) -> Path:
        return self.directory / "site"

    @property
    def opt(self) -> Path:
        """What is seen as `INSIDE`."""
        return self.directory / "opt"
