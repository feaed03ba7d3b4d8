"""The jobs' directories in the run directory, which root handles by descriptors and without following links.

The run directory belongs to root, so only root changes its entries. Each job's directory is a small file system of
its own: an owner who fills it harms no other. If none can be mounted, it is a plain directory. The *content*
belongs to the job's owner, who may change it at any moment or mount something over it. Root only ever detaches and
removes there.
"""

from __future__ import annotations

import os
import stat

from gemini_hpc import clock
from gemini_hpc.node import mounts
from gemini_hpc.node.complaint import log_fault
from gemini_hpc.node.file_lock import acquire_lock_within

ENTRIES_MAX = 4096
DEPTH_MAX = 16
REMOVE_TIMEOUT_S = 2.0  # a user can make a directory arbitrarily large, and a prolog waits for its removal
LOCK_TIMEOUT_S = 2.0  # if the lock's directory is not root's, any user can hold the lock

RUN_OPTIONS = "mode=0755,size=64m,nr_inodes=16384"
JOB_OPTIONS = "mode=0700,size=16m,nr_inodes=512"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class JobDirError(Exception):
    """An error for a directory in an unexpected state; the message describes the state found."""


def open_run_dir(path: str, create: bool) -> int:
    """Open the run directory and return its descriptor.

    With `create`, a missing run directory is made as a small file system of its own.

    Raises:
        FileNotFoundError: The directory is missing and `create` is false.
        JobDirError: The path is not a real directory that belongs to root and that only root can write to.
    """
    if create:
        _create_run_dir(path)
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


def _create_run_dir(path: str) -> None:
    """Make the run directory as a file system of its own.

    Job owners write below it. If they filled /run itself, root's own services would stop. A lock admits one prolog
    at a time: the mount would hide a job's directory that another prolog makes before it.
    """
    if _is_mounted(path):
        return
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise JobDirError(f"{path}.lock could not be made: {exc.strerror}") from None
    try:
        acquire_lock_within(lock, LOCK_TIMEOUT_S)  # without the lock, the mount is made all the same
        os.mkdir(path, 0o755)
        fd = os.open(path, _DIRECTORY)
        try:
            problem = mounts.mount_tmpfs(fd, RUN_OPTIONS)
        finally:
            os.close(fd)
    except FileExistsError:
        return
    except OSError as exc:
        raise JobDirError(f"{path} could not be made: {exc.strerror}") from None
    finally:
        os.close(lock)
    if problem:
        log_fault("prolog", 0, f"{path} has no file system of its own ({problem}): users can fill the one it is on")


def _is_mounted(path: str) -> bool:
    try:
        return os.lstat(path).st_dev != os.lstat(os.path.dirname(path)).st_dev
    except OSError:
        return False


def has_directory(run_fd: int, job: int, uid: int) -> bool:
    """Return whether the job has a directory that belongs to its owner.

    A file system that a user has mounted over it is detached without a request to its server.

    Raises:
        JobDirError: The mount cannot be detached.
    """
    info = read_entry_status(run_fd, str(job))
    return info is not None and stat.S_ISDIR(info.st_mode) and info.st_uid == uid


def read_entry_status(run_fd: int, name: str) -> os.stat_result | None:
    """Return the status of an entry of the run directory after detaching mounts over it; None if it is missing.

    Raises:
        JobDirError: A mount over the entry cannot be detached.
    """
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
    """Make the job's directory (0700, owned by the job's owner) as a file system of its own.

    A directory of the same owner stays as it is. Anything else of that name is a leftover of another job and is
    removed first. Return "", or why the directory has no file system of its own.

    Raises:
        JobDirError: The directory could not be made.
    """
    name = str(job)
    if has_directory(run_fd, job, uid):
        return ""
    remove(run_fd, name)
    # The directory is root's until it is complete: its owner finds it empty and with the right mode, or not at all.
    try:
        os.mkdir(name, 0o700, dir_fd=run_fd)
        fd = os.open(name, _DIRECTORY, dir_fd=run_fd)
    except OSError as exc:
        raise JobDirError(f"the directory of job {job} could not be made: {exc.strerror}") from None
    try:
        problem = mounts.mount_tmpfs(fd, f"{JOB_OPTIONS},uid={uid},gid={gid}")
        if problem:
            os.fchmod(fd, 0o700)
            os.fchown(fd, uid, gid)
    finally:
        os.close(fd)
    return problem


def remove(run_fd: int, name: str) -> None:
    """Remove one entry of the run directory with all its content. A missing entry is fine.

    A file system of the job's own is detached, whatever it contains. A plain directory is removed within bounds on
    entries, depth and time.

    Raises:
        JobDirError: A bound was exceeded. The rest is left for another time.
    """
    try:
        while True:
            fd = mounts.uncover(run_fd, name)
            try:
                if mounts.read_mount_number(fd) == mounts.read_mount_number(run_fd):
                    info = os.fstat(fd)
                    break
                mounts.detach(fd)
            finally:
                os.close(fd)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=run_fd)
            return
        _Removal(info, mounts.read_mount_number(run_fd)).empty(run_fd, name, DEPTH_MAX)
        os.rmdir(name, dir_fd=run_fd)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise JobDirError(f"leftover {name!r} could not be removed: {exc.strerror}") from None


class _Removal:
    """A bounded recursive removal that never leaves the file system and the owner it began with."""

    def __init__(self, top: os.stat_result, mount: int) -> None:
        self.top, self.mount = top, mount
        self.entries_left = ENTRIES_MAX
        self.deadline = clock.monotonic() + REMOVE_TIMEOUT_S

    def empty(self, parent_fd: int, name: str, depth: int) -> None:
        """Remove all content of the directory `name`, at most `depth` levels deep."""
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
        """Open a directory if it is on the removal's own file system.

        The server of another file system may hang, so the removal never sends a request to one.
        """
        path = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            if mounts.read_mount_number(path) != self.mount:
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
