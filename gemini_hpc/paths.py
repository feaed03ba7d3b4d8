"""Check of who could replace a file: every component of its path, with links followed as by the kernel.

Root scripts that run files which a user can change caused the root exploits CVE-2016-10030 and
CVE-2023-41914.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections import deque
from collections.abc import Iterator

_MAX_LINKS = 40


def walk_path(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every directory, link and file on the way to an absolute path. Raises OSError."""
    pending, at, links = deque(path.split("/")), "/", 0
    yield at, os.lstat(at)
    while pending:
        part = pending.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            at = os.path.dirname(at)
            continue
        entry = os.path.join(at, part)
        info = os.lstat(entry)
        yield entry, info
        if not stat.S_ISLNK(info.st_mode):
            at = entry
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(entry)
        at = "/" if target.startswith("/") else at
        pending.extendleft(reversed(target.split("/")))


def find_weakness(path: str, info: os.stat_result, owners: frozenset[int]) -> str:
    """Return why users other than `owners` can change this path, "" if they cannot.

    A link is as safe as its directory.
    """
    if stat.S_ISLNK(info.st_mode):
        return ""
    if info.st_uid not in owners:
        return f"{path} belongs to {name_user(info.st_uid)}"
    # Root's own group may write: on some systems this is the default, and only root is in that group.
    if info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and info.st_gid != 0):
        return f"{path} has mode {stat.S_IMODE(info.st_mode):04o}"
    return ""


def find_weaknesses(path: str, owners: frozenset[int] = frozenset((0,)), *, sticky: bool = False) -> list[str]:
    """Return all weaknesses on the way to `path`.

    Args:
        path: The path of a file.
        owners: The uids that may change it.
        sticky: Accept an owner's directory with the sticky bit, in which each entry belongs to its own owner.
            That holds for an existing file only, not for one that is yet to be made.

    Raises:
        OSError: There is no such file.
    """
    if not path.startswith("/"):
        return [f"{path!r} is not an absolute path"]
    return [
        found
        for entry, info in walk_path(path)
        if (found := find_weakness(entry, info, owners))
        and not (sticky and info.st_uid in owners and stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX)
    ]


def find_barrier(path: str, info: os.stat_result, *, look: bool) -> str:
    """Return how the mode of this path keeps users out, "" if it does not.

    With `look`, a directory's names must be readable, too, as an interpreter reads those of its packages.
    Access lists and security modules are not checked here.
    """
    mode = info.st_mode
    if stat.S_ISLNK(mode):
        return ""
    if stat.S_ISDIR(mode):
        need = stat.S_IXOTH | (stat.S_IROTH if look else 0)
    else:
        need = stat.S_IROTH | (stat.S_IXOTH if mode & stat.S_IXUSR and not look else 0)
    if mode & need == need:
        return ""
    kind = "directory" if stat.S_ISDIR(mode) else "file"
    allowed = f"only {name_user(info.st_uid)}"
    if mode & need >> 3 or (mode & stat.S_IRGRP and mode & stat.S_IXGRP):
        allowed += f" and the group {name_group(info.st_gid)}"
    return f"{allowed} can use the {kind} {path} (mode {stat.S_IMODE(mode):04o})"


def find_barriers(path: str) -> list[str]:
    """Return all barriers on the way to an absolute path, links followed. Raises OSError if there is no such file."""
    return [found for entry, info in walk_path(path) if (found := find_barrier(entry, info, look=False))]


def name_group(gid: int) -> str:
    """Return a group's name for messages."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def name_user(uid: int) -> str:
    """Return a user's name and uid for messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
