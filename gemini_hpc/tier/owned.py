"""Directories and files of the tier, opened by descriptor and checked for their owner.

Other users may write where a tier lies, in a sticky directory such as /scratch or in a group's directory. A
job reads and writes only files of its own user, below directories that no other user can change.
`Directory.path` leads through a descriptor, so a directory that is renamed or replaced later is not followed.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
import stat

_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_THROUGH = re.compile(r"/proc/self/fd/[0-9]+")
# user-visible path by the path through a descriptor; the latest for each descriptor number
_users_paths: dict[str, str] = {}


class NotOurs(PermissionError):
    """A directory or file that another user could have made or changed; `strerror` has the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(errno.EACCES, reason, path)


def _is_writable_by_others(status: os.stat_result) -> bool:
    """Return whether another user can make or rename files in a directory. A user's private group has no others."""
    mode = status.st_mode
    return bool(mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(status.st_gid)))


def _is_private(group: int) -> bool:
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def build_fd_path(fd: int, where: str) -> str:
    """Return the path that leads through a descriptor; error messages show it as `where`."""
    path = f"/proc/self/fd/{fd}"
    _users_paths[path] = where
    return path


def as_users_know(text: str) -> str:
    """Return a message with paths through descriptors replaced by the paths that users know."""
    return _THROUGH.sub(lambda path: _users_paths.get(path[0], path[0]), text)


class Directory:
    """An open directory of the tier.

    `path` leads through its descriptor. `where` is the path as users know it.
    """

    def __init__(self, fd: int, where: str) -> None:
        self._fd, self.where, self.path = fd, where, build_fd_path(fd, where)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor, which makes `path` invalid."""
        os.close(self._fd)

    @classmethod
    def open_tier(cls, path: str) -> Directory:
        """Open the directory that the user or the site has named; a symbolic link to it is followed.

        Raises:
            NotOurs: The owner is neither root nor the job's user, or others may rename what the job makes
                there.
            OSError: The directory cannot be opened.
        """
        found = cls(os.open(path, _FLAGS), path)
        status, reason = os.fstat(found._fd), ""
        if status.st_uid not in (0, os.geteuid()):
            reason = f"belongs to user {status.st_uid}, neither to the job's user nor to root"
        elif _is_writable_by_others(status) and not status.st_mode & stat.S_ISVTX:
            reason = "other users may write there, and it is not sticky: name a directory of your own"
        return found._ensure_ours(reason)

    def open_below(self, name: str) -> Directory:
        """Open a subdirectory that only the job's user can have made.

        Raises:
            NotOurs: It is another user's, a symbolic link, no directory, or others may write there.
            OSError: It cannot be opened.
        """
        where = f"{self.where}/{name}"
        try:
            fd = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=self._fd)
        except NotADirectoryError:
            raise NotOurs(where, f"{name} is no directory, but a link or a file") from None
        found, status, reason = Directory(fd, where), os.fstat(fd), ""
        if status.st_uid != os.geteuid():
            reason = f"{name} belongs to user {status.st_uid}, not to the job's user"
        elif _is_writable_by_others(status):
            reason = f"other users may write into {name}"
        return found._ensure_ours(reason)

    def _ensure_ours(self, reason: str) -> Directory:
        if reason:
            self.close()
            raise NotOurs(self.where, reason)
        return self

    def open_file(self, name: str) -> int:
        """Return a descriptor of a regular file of the job's user in this directory, open for reading.

        Raises:
            NotOurs: The file is another user's, or no regular file.
            OSError: The file cannot be opened.
        """
        where = f"{self.where}/{name}"
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotOurs(where, f"{name} is a symbolic link") from None
            raise
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
            return fd
        os.close(fd)
        raise NotOurs(where, f"{name} is no regular file of the job's user")
