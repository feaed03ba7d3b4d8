"""The paths of a cluster's files, and the paths inside its namespaces that it hides behind its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gemini_hpc.devcluster.errors import DevclusterError

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


@dataclass(frozen=True)
class ClusterFiles:
    """The files of the cluster `name`, all below one root-owned directory, at the same path inside."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise DevclusterError(
                f"cluster name {self.name!r} is not valid: use a lower-case letter, then up to 30 lower-case "
                "letters, digits or hyphens"
            )

    @property
    def directory(self) -> Path:
        """Return the directory of all files."""
        return ROOT / self.name

    @property
    def lock(self) -> Path:
        """Return the path of the lock file."""
        return ROOT / f".{self.name}.lock"

    @property
    def record(self) -> Path:
        """Return the path of the record of `bring_up`'s arguments (`record.ClusterRecord`)."""
        return self.directory / "cluster.json"

    @property
    def outer(self) -> Path:
        """Return the path of the outer init's pid and start time, which the init writes before anything else."""
        return self.directory / "outer.json"

    @property
    def nodes(self) -> Path:
        """Return the directory of the nodes' records."""
        return self.directory / "nodes"

    def locate_node_record(self, node: str) -> Path:
        """Return the path of a node's record."""
        return self.nodes / f"{node}.json"

    def locate_boot_id(self, node: str) -> Path:
        """Return the path of a node's boot id."""
        return self.nodes / f"{node}.boot_id"

    @property
    def etc(self) -> Path:
        """Return the directory of the cluster's own files of /etc."""
        return self.directory / "etc"

    @property
    def slurm_etc(self) -> Path:
        """Return the directory of Slurm's configuration files."""
        return self.etc / "slurm"

    @property
    def slurm_conf(self) -> Path:
        """Return the path of slurm.conf."""
        return self.slurm_etc / "slurm.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        """Return the path of slurmdbd.conf."""
        return self.slurm_etc / "slurmdbd.conf"

    @property
    def settings(self) -> Path:
        """Return the directory of gemini.toml."""
        return self.etc / "gemini-hpc"

    @property
    def log(self) -> Path:
        """Return the directory of the log files."""
        return self.directory / "log"

    @property
    def home(self) -> Path:
        """Return the directory of the users' homes."""
        return self.directory / "home"

    @property
    def spool(self) -> Path:
        """Return the directory of slurmd's spool, a private tmpfs on each node whose content a power cut loses."""
        return self.directory / "spool"

    @property
    def state(self) -> Path:
        """Return the directory StateSaveLocation of slurmctld."""
        return self.directory / "state"

    @property
    def controller(self) -> Path:
        """Return the state directory of the gemini controller service."""
        return self.directory / "controller"

    @property
    def controller_pid(self) -> Path:
        """Return the path of the controller service's pid file."""
        return self.directory / "controller.pid"

    @property
    def munge(self) -> Path:
        """Return the directory of MUNGE's key and logs."""
        return self.directory / "munge"

    @property
    def database(self) -> Path:
        """Return MariaDB's data directory."""
        return self.directory / "database"

    @property
    def site(self) -> Path:
        """Return the directory of the copied site files."""
        return self.directory / "site"

    @property
    def opt(self) -> Path:
        """Return the directory that is seen as `INSIDE`."""
        return self.directory / "opt"
