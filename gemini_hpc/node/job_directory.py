"""The jobs' directories below the run directory, as root handles them: through descriptors, links never followed.

The run directory belongs to root, so nobody else changes the entries in it. Each job's directory is a small file
system of its own, so that what one owner fills is nobody else's; where none can be mounted it is a plain directory.
What is *inside* belongs to the job's owner, who may change it at any moment, or mount something over it: root only
ever detaches and removes there.
"""

from __future__ import annotations

import fcntl
import os
import stat

from gemini_hpc import clock
from gemini_hpc.node import mounts
from gemini_hpc.node.complaint import complain

ENTRIES_MAX = 4096
DEPTH_MAX = 16
REMOVE_TIMEOUT_S = 2.0
LOCK_TIMEOUT_S = 2.0

RUN_OPTIONS = "mode=0755,size=64m,nr_inodes=16384"
JOB_OPTIONS = "mode=0700,size=16m,nr_inodes=512"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class JobDirError(Exception):
    """A directory is not what it must be; the message says what was found."""


def open_run_dir(path: str, create: bool) -> int:
    """Descriptor of the run directory. With `create` it is made where missing, as a small file system of its own.

    Raises `FileNotFoundError` (without `create`) and `JobDirError` unless it is a real directory of root's
    that nobody else can write to.
    """
    if create:
        _create(path)
    try:
        fd = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise JobDirError(f"{path} must be a directory of root's, not a link: {exc.strerror}") from None
    info = os.fstat(fd)
    if info.st_uid != 0 or info.st_mode & 0o022:
        os.close(fd)
        raise JobDirError(
            f"{path} must belong to root and be writable by root only, "
            f"found uid {info.st_uid} mode {stat.S_IMODE(info.st_mode):04o}"
        )
    return fd


def _create(path: str) -> None:
    """Jobs' owners write below it, and what is full must not be /run: there, root's own services would stop.

    One prolog at a time: a job's directory that another one makes before the mount would be hidden by it.
    """
    if _is_mounted(path):
        return
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise JobDirError(f"{path}.lock could not be made: {exc.strerror}") from None
    try:
        _wait_for(lock)
        os.mkdir(path, 0o755)
        fd = os.open(path, _DIRECTORY)
        try:
            problem = mounts.make(fd, RUN_OPTIONS)
        finally:
            os.close(fd)
    except FileExistsError:
        return
    except OSError as exc:
        raise JobDirError(f"{path} could not be made: {exc.strerror}") from None
    finally:
        os.close(lock)
    if problem:
        complain("prolog", 0, f"{path} has no file system of its own ({problem}): users can fill the one it is on")


def _wait_for(lock: int) -> None:
    """The others' mount, for a bounded time: whoever can open the file, where its directory is not root's, can hold
    it."""
    deadline = clock.monotonic() + LOCK_TIMEOUT_S
    while clock.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            clock.sleep(0.01)
        else:
            return


def _is_mounted(path: str) -> bool:
    try:
        return os.lstat(path).st_dev != os.lstat(os.path.dirname(path)).st_dev
    except OSError:
        return False


def exists(run_fd: int, job: int, uid: int) -> bool:
    """Whether the job has a directory of its owner's. Asks nothing of what a user may have mounted over it: that is
    detached. Raises `JobDirError` where it cannot be."""
    info = look(run_fd, str(job))
    return info is not None and stat.S_ISDIR(info.st_mode) and info.st_uid == uid


def look(run_fd: int, name: str) -> os.stat_result | None:
    """What an entry of the run directory is, uncovered; None: there is none. Raises `JobDirError`."""
    try:
        fd = mounts.uncover(run_fd, name)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise JobDirError(f"what is mounted over {name!r} could not be detached: {exc.strerror}") from None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def make(run_fd: int, job: int, uid: int, gid: int) -> str:
    """Makes the job's directory (0700, its owner's), as a file system of its own; "" or why it has none. One of the
    same owner stays as it is; anything else of that name is a leftover of another job and is removed first. Raises
    `JobDirError`."""
    name = str(job)
    if exists(run_fd, job, uid):
        return ""
    remove(run_fd, name)
    # Root's until it is complete: its owner finds it empty and with the right mode, or not at all.
    try:
        os.mkdir(name, 0o700, dir_fd=run_fd)
        fd = os.open(name, _DIRECTORY, dir_fd=run_fd)
    except OSError as exc:
        raise JobDirError(f"the directory of job {job} could not be made: {exc.strerror}") from None
    try:
        problem = mounts.make(fd, f"{JOB_OPTIONS},uid={uid},gid={gid}")
        if problem:
            os.fchmod(fd, 0o700)
            os.fchown(fd, uid, gid)
    finally:
        os.close(fd)
    return problem


def remove(run_fd: int, name: str) -> None:
    """Removes one entry of the run directory with all below it. Its file system is detached, whatever is in it; of a
    plain directory, raises `JobDirError` where the bounds on entries, depth or time are exceeded, and leaves the rest
    for another time. Missing is fine."""
    try:
        while True:
            fd = mounts.uncover(run_fd, name)
            try:
                if mounts.number(fd) == mounts.number(run_fd):
                    info = os.fstat(fd)
                    break
                mounts.detach(fd)
            finally:
                os.close(fd)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=run_fd)
            return
        _Removal(info, mounts.number(run_fd)).empty(run_fd, name, DEPTH_MAX)
        os.rmdir(name, dir_fd=run_fd)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise JobDirError(f"leftover {name!r} could not be removed: {exc.strerror}") from None


class _Removal:
    """Bounds shared by one recursive removal; never leaves the file system and the owner it began with."""

    def __init__(self, top: os.stat_result, mount: int) -> None:
        self.top, self.mount = top, mount
        self.entries_left = ENTRIES_MAX
        self.deadline = clock.monotonic() + REMOVE_TIMEOUT_S

    def empty(self, parent_fd: int, name: str, depth: int) -> None:
        if depth == 0:
            raise JobDirError(f"leftover is deeper than {DEPTH_MAX} directories")
        fd = self._open(parent_fd, name)
        try:
            info = os.fstat(fd)
            if (info.st_dev, info.st_uid) != (self.top.st_dev, self.top.st_uid):
                raise JobDirError("leftover holds a directory of another owner or file system")
            with os.scandir(fd) as entries:
                names = [entry.name for entry, _ in zip(entries, range(self.entries_left + 1), strict=False)]
            for entry in names:
                self.entries_left -= 1
                if self.entries_left < 0 or clock.monotonic() > self.deadline:
                    raise JobDirError("leftover is too large to remove at once")
                self._remove(fd, entry, depth)
        finally:
            os.close(fd)

    def _open(self, parent_fd: int, name: str) -> int:
        """A directory of the file system that the removal is in; another one's server may hang: not asked."""
        path = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            if mounts.number(path) != self.mount:
                raise JobDirError("leftover holds a directory of another owner or file system")
            return os.open(f"/proc/self/fd/{path}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            os.close(path)

    def _remove(self, fd: int, name: str, depth: int) -> None:
        try:
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            self.empty(fd, name, depth - 1)
            os.rmdir(name, dir_fd=fd)
