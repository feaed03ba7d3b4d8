"""The job's directory on this node, as its agent holds it.

The agent's socket is in the directory. Unmounting the directory (`umount -l`), or the run directory above it, takes
away the way to the agent, but not the agent's open files. The job's next prolog or epilog makes another directory.
The agent finds it by itself and moves in. A mount made there by anyone but root is not the agent's directory, and the
agent does not look inside.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Literal

from gemini_hpc.node import mounts, spawn
from gemini_hpc.node.file_lock import acquire_lock_within

SOCKET = "agent.sock"
_NAME = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH = _NAME | os.O_DIRECTORY
_FILES_MAX = 512

Found = Literal["here", "silent", "gone", "moved"]


class OwnDirectory:
    """The agent's hold on the job's directory."""

    def __init__(self, path: str, uid: int) -> None:
        """Create a hold that is not yet taken.

        Args:
            path: Path at which the directory should be.
            uid: User id of the job's owner.
        """
        self.path, self._uid = path, uid
        self._fd = -1
        self._mount = -1  # number of the mount with the directory, -1 if it cannot be seen

    def lock_directory(self) -> bool:
        """Become the directory's only agent for the life of this process.

        Return whether no other agent is there.

        Raises:
            OSError: The directory cannot be opened.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not acquire_lock_within(fd):
            os.close(fd)
            return False
        self._fd, self._mount = fd, _find_mount(fd)
        return True

    def check_directory(self) -> Found:
        """Return the state of the directory, after a move into a new one made by root. Raises nothing.

        - here: the directory is in place, with a socket.
        - silent: the directory is in place, without a socket.
        - gone: the path has no directory, or none made by root.
        - moved: the agent is now in a new directory, with its files, and without a socket.
        """
        try:
            seen = os.open(self.path, _PATH)
        except OSError:
            return "gone"
        try:
            if not self._is_roots(seen):
                return "gone"
            seen_status, own_status = os.fstat(seen), os.fstat(self._fd)
            if (seen_status.st_dev, seen_status.st_ino) == (own_status.st_dev, own_status.st_ino):
                return "here" if _has_socket(seen) else "silent"
            if seen_status.st_uid != self._uid or seen_status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                return "gone"
            return "moved" if self._move(seen) else "gone"
        except OSError:
            return "gone"
        finally:
            os.close(seen)

    def _is_roots(self, fd: int) -> bool:
        """Return whether a descriptor is in a mount made by the prolog, or in no mount of its own.

        Only the mount is looked at: a user's file system might never answer.

        Raises:
            OSError: The mounts cannot be read.
        """
        number = _find_mount(fd)
        if number < 0:  # Linux before 5.14 hides the /proc data of a process closed to its owner even from itself
            real = os.path.join(os.path.realpath(os.path.dirname(self.path)), os.path.basename(self.path))
            over = [mount for mount in mounts.list_mounts() if mount.point == real]
            return not over or over[-1].ours
        if number == self._mount:
            return True
        above = os.open(os.path.dirname(self.path), _PATH)
        try:
            if number == mounts.read_mount_number(above):
                return True
        finally:
            os.close(above)
        mount = mounts.find_mount(fd)
        return mount is not None and mount.ours

    def _move(self, seen: int) -> bool:
        """Move into the directory of a path descriptor, with the files that a successor needs.

        Return whether no other agent is there.

        Raises:
            OSError: The new directory cannot be used.
        """
        new_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=seen)
        if not acquire_lock_within(new_fd):
            os.close(new_fd)
            return False
        before, self._fd = self._fd, new_fd
        mount, self._mount = self._mount, _find_mount(new_fd)
        with os.scandir(before) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_FILES_MAX), strict=False)]
        for name in names:
            with suppress(OSError):  # the directory is full, or no file: a missing one costs a successor a new round
                _copy(name, before, mount, new_fd)
        self._follow_log(before)
        os.close(before)
        return True

    def _follow_log(self, before: int) -> None:
        """Continue in the log's copy, if this process has written to the log."""
        with suppress(OSError):
            log, out = os.stat(spawn.LOG_NAME, dir_fd=before, follow_symlinks=False), os.fstat(1)
            if (log.st_dev, log.st_ino) == (out.st_dev, out.st_ino):
                spawn.redirect_output(f"{self.path}/{spawn.LOG_NAME}")


def _find_mount(fd: int) -> int:
    try:
        return mounts.read_mount_number(fd)
    except OSError:
        return -1


def _has_socket(fd: int) -> bool:
    """Return whether the directory has a socket's name. Only the name is looked up.

    The owner may have mounted a file system in its place that never answers.
    """
    try:
        os.close(os.open(SOCKET, _NAME, dir_fd=fd))
    except FileNotFoundError:
        return False
    return True


def _copy(name: str, source: int, mount: int, target: int) -> None:
    """Copy a regular file of this mount. A file system of 16 MiB bounds its size.

    Raises:
        OSError: The file cannot be read or written.
    """
    seen = os.open(name, _NAME, dir_fd=source)
    try:
        if mount < 0 or mounts.read_mount_number(seen) != mount or not stat.S_ISREG(os.fstat(seen).st_mode):
            return
        old = os.open(f"/proc/self/fd/{seen}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(seen)
    try:
        new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            while data := os.read(old, 1 << 16):
                os.write(new, data)
        except OSError:  # half of the file would have another meaning
            os.unlink(name, dir_fd=target)
            raise
        finally:
            os.close(new)
    finally:
        os.close(old)
