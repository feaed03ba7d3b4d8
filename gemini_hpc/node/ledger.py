"""What root knows of the agents on this node: a small file for each job, in a directory that only root can enter.

The prolog enters a job with the cgroup of its agent, the epilog notes when its incarnation has ended here, and
whoever ends the agent (`reaper`) strikes it out. Nothing in it comes from the agent. It lies beside the run
directory: to unmount that takes the jobs' directories away, and not what root knows of their agents. Times are those
of CLOCK_BOOTTIME; what is left of an earlier boot counts as not there.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace

from gemini_hpc import clock
from gemini_hpc.node.cgroup import NO_GROUP, Group

SUFFIX = ".agents"
LOCK_TIMEOUT_S = 4.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENTRY_BYTES = 16384


def boot_id() -> str:
    """The kernel's name for this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f.read(64).strip()


@dataclass(frozen=True, slots=True)
class Entry:
    """One job. restart: of the incarnation that the prolog has announced last; started_s: when it did; ended_s: when
    the epilog of that one came, None while it runs here; doubted_s: since when nobody has answered for it although no
    epilog came, None where somebody does; released: its agent has let go, and may still write to the tier; boot: of
    the node."""

    job: int
    uid: int
    restart: int
    group: Group = NO_GROUP
    ended_s: float | None = None
    started_s: float = 0.0
    doubted_s: float | None = None
    released: bool = False
    boot: str = field(default_factory=boot_id)


def now_s() -> float:
    """The clock of `Entry.ended_s`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Ledger:
    """All entries, for one process at a time."""

    def __init__(self, directory_fd: int) -> None:
        self._fd = directory_fd

    def get(self, job: int) -> Entry | None:
        """The entry of a job; None: there is none that can be read."""
        try:
            fd = os.open(str(job), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            with os.fdopen(fd, "rb") as f:
                text = json.loads(f.read(_ENTRY_BYTES))
            group = Group(int(text["group"]["version"]), tuple(map(str, text["group"]["directories"])))
            ended, doubted = (None if text.get(at) is None else float(text[at]) for at in ("ended_s", "doubted_s"))
            uid, restart, started = int(text["uid"]), int(text["restart"]), float(text.get("started_s", 0.0))
            if text["boot"] != boot_id():
                return None
            return Entry(job, uid, restart, group, ended, started, doubted, bool(text["released"]), text["boot"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, entry: Entry) -> None:
        """Write an entry, in one step. Raises OSError."""
        temporary = f"new.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=self._fd), "w") as f:
            json.dump(asdict(entry), f)
        os.rename(temporary, str(entry.job), src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def strike(self, job: int) -> None:
        """No agent of this job is here any more."""
        with suppress(OSError):
            os.unlink(str(job), dir_fd=self._fd)

    def __iter__(self) -> Iterator[Entry]:
        for name in sorted(os.listdir(self._fd)):
            if name.isascii() and name.isdecimal() and (entry := self.get(int(name))) is not None:
                yield entry

    def started(self, job: int, uid: int, restart: int) -> None:
        """An incarnation begins here: what is kept for it is not ended. Raises OSError."""
        known = self.get(job)
        if known is None or known.uid != uid:
            known = Entry(job, uid, restart)
        restart = max(restart, known.restart)
        self.put(replace(known, restart=restart, started_s=now_s(), ended_s=None, doubted_s=None, released=False))

    def ended(self, job: int, uid: int, restart: int) -> None:
        """The epilog of an incarnation: the agent may stay, but not for ever. Raises OSError."""
        known = self.get(job)
        if known is None or known.uid != uid:
            self.put(Entry(job, uid, restart, ended_s=now_s()))
        elif restart > known.restart:  # of one that no prolog has announced
            self.put(replace(known, restart=restart, ended_s=now_s(), doubted_s=None))
        elif restart == known.restart and known.ended_s is None:
            self.put(replace(known, ended_s=now_s(), doubted_s=None))

    def lets_go(self, known: Entry) -> None:
        """The agent has released what it held; nothing is changed where its entry is another one by now. Raises
        OSError."""
        if self.get(known.job) == known:
            self.put(replace(known, released=True))

    def goes_on(self, known: Entry) -> None:
        """The job runs here after all; nothing is changed where its entry is another one by now. Raises OSError."""
        if self.get(known.job) == known:
            self.put(replace(known, ended_s=None, doubted_s=None))

    def doubt(self, known: Entry, since_s: float | None) -> None:
        """Nobody answers for a job since then, or somebody does again (None); nothing is changed where its entry is
        another one by now. Raises OSError."""
        if self.get(known.job) == known:
            self.put(replace(known, doubted_s=since_s))


def place(run_dir: str) -> str:
    """Return the directory of the ledger of a run directory."""
    return run_dir.rstrip("/") + SUFFIX


def lock(run_dir: str, name: str) -> int:
    """Take a lock beside the ledger, for a process that runs once on a node.

    Returns:
        Its descriptor, -1 where another process has it.

    Raises:
        OSError: there is no ledger yet.
    """
    fd = os.open(f"{place(run_dir)}/{name}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return -1
    return fd


@contextmanager
def opened(run_dir: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Ledger]:
    """The ledger of a run directory, locked; made where missing. Nobody holds it while waiting for a process. Raises
    OSError, TimeoutError."""
    path = place(run_dir)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    fd = os.open(path, _DIRECTORY)
    try:
        info = os.fstat(fd)
        if info.st_uid != 0 or info.st_mode & 0o077:
            raise OSError(1, f"{path} is not root's alone")
        deadline = clock.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.monotonic() > deadline:
                    raise TimeoutError(f"{path} is locked") from None
                clock.sleep(0.01)
        yield Ledger(fd)
    finally:
        os.close(fd)
