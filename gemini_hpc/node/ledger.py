"""The ledger: root's own record of the agents on this node, one small file for each job.

Only root can enter its directory. The prolog enters a job with the cgroup of its agent. The epilog records when the
incarnation ended here. The process that ends the agent (`reaper`) strikes the entry out. Nothing in the ledger
comes from the agent. The ledger lies beside the run directory: unmounting the run directory removes the jobs'
directories, but not root's record of their agents. Times are those of CLOCK_BOOTTIME. Entries of an earlier boot
are ignored.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace

from gemini_hpc.node.cgroup import NO_GROUP, AgentCgroup
from gemini_hpc.node.file_lock import acquire_lock_within

SUFFIX = ".agents"
LOCK_TIMEOUT_S = 4.0  # no process holds the lock for long, since none waits under it
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENTRY_BYTES = 16384


def read_boot_id() -> str:
    """Return the kernel's name for this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f.read(64).strip()


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The entry of one job.

    Attributes:
        job: The job's id.
        uid: The uid of the job's owner.
        restart: Restart count of the last incarnation that the prolog announced.
        group: The cgroup of the job's agent.
        ended_s: Time of that incarnation's epilog; None while the incarnation runs here.
        started_s: Time at which the prolog announced that incarnation.
        doubted_s: Time since which no agent answers and no step runs although no epilog came; None otherwise.
        released: Whether the agent has released its memory. It may still write to the tier.
        boot: The node's boot.
    """

    job: int
    uid: int
    restart: int
    group: AgentCgroup = NO_GROUP
    ended_s: float | None = None
    started_s: float = 0.0
    doubted_s: float | None = None
    released: bool = False
    boot: str = field(default_factory=read_boot_id)


def read_boot_clock_s() -> float:
    """Return the current time on the clock of `LedgerEntry.ended_s`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Ledger:
    """The entries of all jobs, accessible to one process at a time."""

    def __init__(self, directory_fd: int) -> None:
        self._fd = directory_fd

    def get(self, job: int) -> LedgerEntry | None:
        """Return the entry of a job, or None if there is none that can be read."""
        try:
            fd = os.open(str(job), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            with os.fdopen(fd, "rb") as f:
                text = json.loads(f.read(_ENTRY_BYTES))
            group = AgentCgroup(int(text["group"]["version"]), tuple(map(str, text["group"]["directories"])))
            ended, doubted = (None if text.get(at) is None else float(text[at]) for at in ("ended_s", "doubted_s"))
            uid, restart, started = int(text["uid"]), int(text["restart"]), float(text.get("started_s", 0.0))
            if text["boot"] != read_boot_id():
                return None
            return LedgerEntry(
                job, uid, restart, group, ended, started, doubted, bool(text["released"]), text["boot"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, entry: LedgerEntry) -> None:
        """Write an entry atomically.

        Raises:
            OSError: The entry could not be written.
        """
        temporary = f"new.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=self._fd), "w") as f:
            json.dump(asdict(entry), f)
        os.rename(temporary, str(entry.job), src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def strike(self, job: int) -> None:
        """Remove the entry of a job, which has no agent here any more."""
        with suppress(OSError):
            os.unlink(str(job), dir_fd=self._fd)

    def __iter__(self) -> Iterator[LedgerEntry]:
        for name in sorted(os.listdir(self._fd)):
            if name.isascii() and name.isdecimal() and (entry := self.get(int(name))) is not None:
                yield entry

    def record_start(self, job: int, uid: int, restart: int) -> None:
        """Record that an incarnation begins here. The entry no longer counts as ended, doubted or released.

        Raises:
            OSError: The entry could not be written.
        """
        known = self.get(job)
        if known is None or known.uid != uid:
            known = LedgerEntry(job, uid, restart)
        restart = max(restart, known.restart)
        self.put(
            replace(
                known, restart=restart, started_s=read_boot_clock_s(), ended_s=None, doubted_s=None, released=False
            )
        )

    def record_end(self, job: int, uid: int, restart: int) -> None:
        """Record the epilog of an incarnation. The agent may stay from then on, but only for a limited time.

        Raises:
            OSError: The entry could not be written.
        """
        known = self.get(job)
        if known is None or known.uid != uid:
            self.put(LedgerEntry(job, uid, restart, ended_s=read_boot_clock_s()))
        elif restart > known.restart:  # no prolog has announced this incarnation
            self.put(replace(known, restart=restart, ended_s=read_boot_clock_s(), doubted_s=None))
        elif restart == known.restart and known.ended_s is None:
            self.put(replace(known, ended_s=read_boot_clock_s(), doubted_s=None))

    def record_release(self, known: LedgerEntry) -> None:
        """Record that the agent has released its memory, unless its entry has changed since `known` was read.

        Raises:
            OSError: The entry could not be written.
        """
        if self.get(known.job) == known:
            self.put(replace(known, released=True))

    def withdraw_end(self, known: LedgerEntry) -> None:
        """Record that the job runs here after all, unless its entry has changed since `known` was read.

        Raises:
            OSError: The entry could not be written.
        """
        if self.get(known.job) == known:
            self.put(replace(known, ended_s=None, doubted_s=None))

    def record_doubt(self, known: LedgerEntry, since_s: float | None) -> None:
        """Record since when no agent answers for a job, unless its entry has changed since `known` was read.

        None as `since_s` records that an agent answers again.

        Raises:
            OSError: The entry could not be written.
        """
        if self.get(known.job) == known:
            self.put(replace(known, doubted_s=since_s))


def locate_directory(run_dir: str) -> str:
    """Return the directory of the ledger that belongs to a run directory."""
    return run_dir.rstrip("/") + SUFFIX


def acquire_lock(run_dir: str, name: str) -> int:
    """Take a lock beside the ledger, for a process of which a node runs only one.

    Returns:
        The lock's descriptor; -1 if another process has the lock.

    Raises:
        OSError: There is no ledger yet.
    """
    fd = os.open(f"{locate_directory(run_dir)}/{name}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if acquire_lock_within(fd):
        return fd
    os.close(fd)
    return -1


@contextmanager
def open_ledger(run_dir: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Ledger]:
    """Lock the ledger of a run directory and yield it. A missing ledger is made.

    No process holds the lock while it waits for another process.

    Raises:
        OSError: The ledger cannot be opened, or does not belong to root alone.
        TimeoutError: The ledger stayed locked for `timeout_s` seconds.
    """
    path = locate_directory(run_dir)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    fd = os.open(path, _DIRECTORY)
    try:
        info = os.fstat(fd)
        if info.st_uid != 0 or info.st_mode & 0o077:
            raise OSError(1, f"{path} is not root's alone")
        if not acquire_lock_within(fd, timeout_s):
            raise TimeoutError(f"{path} is locked")
        yield Ledger(fd)
    finally:
        os.close(fd)
