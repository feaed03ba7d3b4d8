"""The job's directory on this node, as its agent holds it.

Its socket lies there. To unmount the directory (`umount -l`), or the run directory above it, takes away the way to
the agent, and not what the agent has open. The next prolog or epilog of the job makes another directory; the agent
finds it by itself, and moves in. What anybody but root has mounted there is not its directory, and is not looked
through.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from typing import Literal

from gemini_hpc.node import mounts, spawn

SOCKET = "agent.sock"
_NAME = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH = _NAME | os.O_DIRECTORY
_FILES_MAX = 512

Found = Literal["here", "silent", "gone", "moved"]


class OwnDirectory:
    """See the module. path: where it is to be; uid: the job's owner."""

    def __init__(self, path: str, uid: int) -> None:
        self.path, self._uid = path, uid
        self._fd = -1
        self._mount = -1  # the number of the one that it is in; -1: not to be seen

    def hold(self) -> bool:
        """Be its one agent, for as long as this process lives; False: there is another. Raises OSError."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not _lock(fd):
            os.close(fd)
            return False
        self._fd, self._mount = fd, _mount(fd)
        return True

    def look(self) -> Found:
        """Return the state of the directory, after a move into a new one of root's. Raises nothing.

        silent: it is in its place, without a socket; gone: nothing is there, or nothing of root's; moved: the agent
        is in a new one now, with its files, and without a socket.
        """
        try:
            seen = os.open(self.path, _PATH)
        except OSError:
            return "gone"
        try:
            if not self._is_roots(seen):
                return "gone"
            there, mine = os.fstat(seen), os.fstat(self._fd)
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                return "here" if _has_socket(seen) else "silent"
            if there.st_uid != self._uid or there.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                return "gone"
            return "moved" if self._move(seen) else "gone"
        except OSError:
            return "gone"
        finally:
            os.close(seen)

    def _is_roots(self, fd: int) -> bool:
        """Return whether a descriptor is in a mount of the prolog's, or in none of its own. Raises OSError.

        Only the mount is looked at: a user's file system need not answer.
        """
        number = _mount(fd)
        if number < 0:  # Linux before 5.14 shows a process that is closed to its owner nothing of itself
            real = os.path.join(os.path.realpath(os.path.dirname(self.path)), os.path.basename(self.path))
            over = [mount for mount in mounts.listed() if mount.point == real]
            return not over or over[-1].ours
        if number == self._mount:
            return True
        above = os.open(os.path.dirname(self.path), _PATH)
        try:
            if number == mounts.number(above):
                return True
        finally:
            os.close(above)
        mount = mounts.own(fd)
        return mount is not None and mount.ours

    def _move(self, seen: int) -> bool:
        """Into the directory of a path descriptor, with what a successor is to find. False: another agent is there.
        Raises OSError."""
        there = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=seen)
        if not _lock(there):
            os.close(there)
            return False
        before, self._fd = self._fd, there
        mount, self._mount = self._mount, _mount(there)
        with os.scandir(before) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_FILES_MAX), strict=False)]
        for name in names:
            with suppress(OSError):  # it is full, or no file: what is missing costs a successor a new round
                _copy(name, before, mount, there)
        self._follow_log(before)
        os.close(before)
        return True

    def _follow_log(self, before: int) -> None:
        """Write on to the log's copy, where this process has written to the log."""
        with suppress(OSError):
            log, out = os.stat(spawn.LOG_NAME, dir_fd=before, follow_symlinks=False), os.fstat(1)
            if (log.st_dev, log.st_ino) == (out.st_dev, out.st_ino):
                spawn.write_to(f"{self.path}/{spawn.LOG_NAME}")


def _mount(fd: int) -> int:
    try:
        return mounts.number(fd)
    except OSError:
        return -1


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_socket(fd: int) -> bool:
    """Only its name is looked for: in its place an owner may have mounted what never answers."""
    try:
        os.close(os.open(SOCKET, _NAME, dir_fd=fd))
    except FileNotFoundError:
        return False
    return True


def _copy(name: str, source: int, mount: int, target: int) -> None:
    """Copy a regular file of this mount; a file system of 16 MiB bounds it. Raises OSError."""
    seen = os.open(name, _NAME, dir_fd=source)
    try:
        if mount < 0 or mounts.number(seen) != mount or not stat.S_ISREG(os.fstat(seen).st_mode):
            return
        old = os.open(f"/proc/self/fd/{seen}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(seen)
    try:
        new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            while data := os.read(old, 1 << 16):
                os.write(new, data)
        except OSError:  # half of it would say something else
            os.unlink(name, dir_fd=target)
            raise
        finally:
            os.close(new)
    finally:
        os.close(old)
