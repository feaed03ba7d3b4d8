"""The facts that the checks use, each looked up once: settings, Slurm's answers, this host's files and processes.

A fact that is not available raises `Unavailable`. The checks that need it are skipped then and give the
reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pwd
import re
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from gemini_hpc.config import ConfigError, Settings, load_site_settings
from gemini_hpc.controller.primary import is_here
from gemini_hpc.doctor.finding import Unavailable, read_or
from gemini_hpc.files import read_regular_file
from gemini_hpc.node import ledger
from gemini_hpc.slurm import Slurm, SlurmError, SlurmUnreachable
from gemini_hpc.slurm.api import find_job
from gemini_hpc.slurm.facts import Job, Node, Reservation, WatchedJob

CONTROLLER, NODE, LOGIN = "controller", "node", "login"
ROLES = (CONTROLLER, NODE, LOGIN)
SLURM_TIMEOUT_S = 8.0  # a busy slurmctld answers within seconds; a check has 20 s
DIGEST_DIGITS = 12  # of a file's digest that is shown: enough to compare
T = TypeVar("T")
_PENDING = object()
_RELEASE = re.compile(r"([0-9]{2})\.([0-9]{1,2})(?:\.([0-9]{1,3}))?")
_UNLIMITED = frozenset(("UNLIMITED", "INFINITE", "65534", "4294967294"))


@dataclass(frozen=True, slots=True, order=True)
class SlurmRelease:
    """A release of Slurm."""

    major: int
    minor: int
    micro: int

    @classmethod
    def parse(cls, text: str) -> SlurmRelease:
        """Return the release in a text such as `slurm-wlm 22.05.8`. Raises `Unavailable`."""
        found = _RELEASE.search(text)
        if not found:
            raise Unavailable(f"cannot find Slurm's release in {text[:60]!r}")
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))

    @property
    def series(self) -> tuple[int, int]:
        """Return the major and minor number, for which a plugin must be built."""
        return self.major, self.minor

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02}.{self.micro}"


class Configuration:
    """The keys and values of a configuration; a key that this release does not print is empty."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> str:
        return self._values.get(key, "")

    def list_values(self, key: str) -> list[str]:
        """Return the values of `Key`, or of `Key[0]`, `Key[1]`, ... as printed by later releases."""
        found = [v for k, v in self._values.items() if re.fullmatch(rf"{key}(\[[0-9]+\])?", k)]
        return [v for v in found if v]

    def parse_words(self, key: str) -> dict[str, str]:
        """Return a list of `word` and `word=value`, separated by commas or semicolons; words in lower case."""
        parts = [p.strip() for p in re.split(r"[,;]", self[key]) if p.strip()]
        return {name.lower(): value for name, _, value in (p.partition("=") for p in parts)}

    def parse_number(self, key: str) -> float | None:
        """Return a number, such as that of `60 sec`; infinity if it is unlimited, None if it is absent."""
        first = self[key].split()[0] if self[key].split() else ""
        if first.upper() in _UNLIMITED:
            return float("inf")
        return float(first) if re.fullmatch(r"[0-9]{1,15}", first) else None

    @property
    def controllers(self) -> list[str]:
        """Return the short names of slurmctld's hosts, the primary first."""
        return [host.partition("(")[0].partition(".")[0] for host in self.list_values("SlurmctldHost")]

    @property
    def release(self) -> SlurmRelease:
        """Return slurmctld's release. Raises `Unavailable`."""
        return SlurmRelease.parse(self["SLURM_VERSION"])


@dataclass(frozen=True, slots=True)
class Here:
    """The name of this host, and the facts that tell its installation from another.

    Attributes:
        host: Short name of the host.
        settings_sha256: First digits of the digest of the settings' file; "" if it cannot be read.
        agents: Number of jobs with an agent here, by root's ledger; None if it cannot be read.
    """

    host: str
    settings_sha256: str
    agents: int | None


class HostFacts:
    """The facts about this host and its cluster.

    Each lookup runs in the thread of the check that asks first.
    """

    def __init__(self, config_path: str, role: str = "auto") -> None:
        self.config_path = config_path
        self.uid = os.geteuid()
        self.hostname = socket.gethostname().partition(".")[0]
        self._role = role
        self._known: dict[str, Any] = {}
        self._unreachable = ""

    def _remember(self, fact: str, look: Callable[[], T]) -> T:
        known = self._known.get(fact)
        if known is None:
            self._known[fact] = _PENDING
            try:
                known = look()
            except Unavailable as exc:
                known = exc
            except Exception as exc:
                known = Unavailable(f"{fact}: {type(exc).__name__}: {exc}")
            self._known[fact] = known
        if known is _PENDING:  # the check that began the lookup was aborted
            raise Unavailable(f"{fact}: no answer yet")
        if isinstance(known, Unavailable):
            raise known
        return cast(T, known)

    # ---- the user -------------------------------------------------------------------------------

    @property
    def root(self) -> bool:
        """Return whether this process runs as root."""
        return self.uid == 0

    def require_root(self, fact: str) -> None:
        """Raise `Unavailable` unless this process runs as root."""
        if not self.root:
            raise Unavailable(f"{fact}: only root can see it; run it again as root")

    def require_slurm_user(self, fact: str) -> None:
        """Raise `Unavailable` unless this process runs as root or SlurmUser."""
        if not self.root and self.uid != self.slurm_uid:
            raise Unavailable(f"{fact}: only root and {self.settings.slurm_user} can see it; run it again as root")

    # ---- settings --------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """Return the settings in gemini.toml."""

        def read_settings() -> Settings:
            try:
                return load_site_settings(self.config_path)
            except ConfigError:
                raise Unavailable("the settings cannot be used (see files.settings)") from None

        return self._remember("settings", read_settings)

    @property
    def slurm_uid(self) -> int:
        """Return the uid on this host of the settings' `slurm_user`."""
        try:
            return pwd.getpwnam(self.settings.slurm_user).pw_uid
        except KeyError:
            raise Unavailable(f"slurm_user {self.settings.slurm_user!r} is not a user of this host") from None

    # ---- Slurm -----------------------------------------------------------------------------------------

    def ask_slurm(self, question: Callable[[Slurm], Awaitable[T]]) -> T:
        """Run one or several Slurm commands and return the answer. Raises `Unavailable` with Slurm's message."""

        async def ask() -> T:
            return await question(Slurm(SLURM_TIMEOUT_S))

        if self._unreachable:
            raise Unavailable(self._unreachable)
        try:
            return asyncio.run(ask())
        except SlurmUnreachable as exc:
            self._unreachable = f"Slurm: {exc}"  # each further request would wait as long
            raise Unavailable(self._unreachable) from None
        except SlurmError as exc:
            raise Unavailable(f"Slurm: {exc}") from None

    @property
    def conf(self) -> Configuration:
        """Return the configuration that slurmctld runs with."""
        return self._remember("configuration", lambda: Configuration(self.ask_slurm(Slurm.read_configuration)))

    @property
    def release(self) -> SlurmRelease:
        """Return the release of Slurm's commands on this host, which its plugins must be built for."""
        return self._remember("release", lambda: SlurmRelease.parse(self.ask_slurm(Slurm.read_release)))

    @property
    def nodes(self) -> dict[str, Node]:
        """Return all nodes."""
        return self._remember("nodes", lambda: self.ask_slurm(Slurm.read_nodes))

    @property
    def reservations(self) -> list[Reservation]:
        """Return all reservations."""
        return self._remember("reservations", lambda: self.ask_slurm(Slurm.read_reservations))

    @property
    def queue(self) -> dict[int, WatchedJob]:
        """Return all unfinished jobs by raw id.

        If Slurm keeps other users' jobs private, only one's own jobs are visible.
        """
        return self._remember("queue", lambda: {row.raw_id: row for row in self.ask_slurm(Slurm.read_queue)})

    def find_job(self, raw_id: int) -> Job | None:
        """Return one job, None if Slurm does not know it."""
        return self._remember(f"job {raw_id}", lambda: (self.ask_slurm(lambda slurm: find_job(slurm, raw_id)),))[0]

    # ---- this host -------------------------------------------------------------------------------------

    @property
    def here(self) -> Here:
        """Return what names this host and its installation."""
        digest = ""
        with suppress(OSError):
            digest = hashlib.sha256(read_regular_file(self.config_path, 1 << 20)).hexdigest()[:DIGEST_DIGITS]
        return Here(self.hostname, digest, self._count_agents())

    def _count_agents(self) -> int | None:
        try:
            run_dir = self.settings.run_dir
            if not self.root or not os.path.isdir(ledger.locate_directory(run_dir)):
                return 0 if self.root else None
            with ledger.open_ledger(run_dir) as entries:
                return len(list(entries))
        except (Unavailable, OSError):
            return None

    @property
    def own_node(self) -> Node | None:
        """Return Slurm's record of this host, None if it is no node."""
        matches = [n for n in self.nodes.values() if self.hostname in (n.hostname.partition(".")[0], n.name)]
        return matches[0] if matches else None

    @property
    def roles(self) -> frozenset[str]:
        """Return the kinds of this host: one or more of `ROLES`."""
        if self._role != "auto":
            return frozenset((self._role,))
        return self._remember("roles", self._find_roles)

    def _find_roles(self) -> frozenset[str]:
        found: set[str] = set()
        try:
            if self.hostname in self.conf.controllers:
                found.add(CONTROLLER)
            if self.own_node is not None:
                found.add(NODE)
        except Unavailable:  # without Slurm, the running daemons show the roles
            names = {process.name for process in self.processes}
            found |= {role for role, daemon in ((CONTROLLER, "slurmctld"), (NODE, "slurmd")) if daemon in names}
        settings = read_or(None, lambda: self.settings)
        if settings is not None and any(is_here(host, "") for host in settings.list_controller_hosts()):
            found.add(CONTROLLER)
        return frozenset(found or {LOGIN})

    @property
    def processes(self) -> list[Process]:
        """Return the processes that this user can see."""
        return self._remember("processes", list_processes)


def read_text(path: str, most_bytes: int = 1 << 20) -> str:
    """Return the text of a file, or the beginning of a larger one. Raises OSError."""
    return read_regular_file(path, most_bytes).decode(errors="replace")


def run_program(argv: Sequence[str], timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that needs nothing of this process's environment. Raises OSError, TimeoutExpired."""
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout_s,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", **variables},
        cwd="/",
        check=False,
    )


AGENT, CONTROL = b"gemini_hpc.agent", b"gemini_hpc.controller"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Process:
    """A process; `arguments` is set by the process itself, and thus only a hint."""

    pid: int
    parent: int
    uid: int
    name: str
    arguments: tuple[bytes, ...]

    @property
    def agent_of(self) -> int | None:
        """Return the job whose agent (or agent's supervisor) this process is."""
        if AGENT not in self.arguments or b"--job" not in self.arguments:
            return None
        after = self.arguments[self.arguments.index(b"--job") + 1 :]
        return int(after[0]) if after and after[0].isdigit() and len(after[0]) <= 10 else None

    @property
    def controller(self) -> bool:
        """Return whether this process is the controller service."""
        return CONTROL in self.arguments or (
            b"controller" in self.arguments and any(a.endswith(b"gemini-hpc") for a in self.arguments[:3])
        )


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as f:
        return f.read(_MAX_BYTES)


def _read_uid(pid: str) -> int:
    """Return a process's effective uid.

    The owner of its files in /proc does not tell it, because those of an untraceable process, such as an
    agent, belong to root.
    """
    line = next(line for line in _read(pid, "status").splitlines() if line.startswith(b"Uid:"))
    return int(line.split()[2])


def _iterate_processes() -> Iterator[Process]:
    for pid in os.listdir("/proc"):
        if not pid.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):
            before, _, after = _read(pid, "stat").rpartition(b")")
            name = before.partition(b"(")[2].decode(errors="replace")
            arguments = tuple(a for a in _read(pid, "cmdline").split(b"\0") if a)
            yield Process(int(pid), int(after.split()[1]), _read_uid(pid), name, arguments)


def list_processes() -> list[Process]:
    """Return all processes; a process that ends meanwhile is left out."""
    return list(_iterate_processes())


def read_environment(pid: int) -> dict[bytes, bytes]:
    """Return the environment that a process was started with; {} if it cannot be read."""
    with suppress(OSError):
        pairs = (entry.partition(b"=") for entry in _read(str(pid), "environ").split(b"\0"))
        return {name: value for name, _, value in pairs}
    return {}


def maps_file(pid: int, name: str) -> bool:
    """Return whether a process has a file of this name mapped.

    The result is True if the process has ended meanwhile, so that it is not reported.
    """
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as f:
            return any(f"/{name}" in line for line in f)
    except FileNotFoundError:
        return True


def list_sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets that a process holds; an empty set if they cannot be read."""
    found: set[int] = set()
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError, ValueError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found
