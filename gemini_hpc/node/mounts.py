"""What is mounted at and below an entry of the run directory, without a look at what a user has mounted there.

A user may mount a file system of their own (FUSE) over a directory of their own, and its server need not answer: then
whoever looks through it hangs, root too. A descriptor that is opened as a path only asks nobody, and names its mount.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass

SOURCE = "gemini-hpc"
_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_MNT_DETACH = 2
_COVERS_MAX = 64
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    number: int
    point: str
    kind: str
    source: str

    @property
    def ours(self) -> bool:
        """Whether root's prolog has mounted it: users may mount nothing of this kind."""
        return self.kind == "tmpfs" and self.source == SOURCE


def listed() -> list[Mount]:
    """All mounts that are seen from here, the older ones first."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            left, _, right = line.rstrip("\n").partition(" - ")
            fields, source = left.split(" "), right.split(" ")
            if len(fields) > 4 and len(source) > 1:
                found.append(Mount(int(fields[0]), _plain(fields[4]), source[0], _plain(source[1])))
    return found


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda m: chr(int(m[1], 8)), text)


def number(fd: int) -> int:
    """The kernel's number of the mount that a descriptor is in; nobody is asked."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as f:
        return next((int(line.split()[1]) for line in f if line.startswith("mnt_id:")), -1)


def own(fd: int) -> Mount | None:
    """The mount that a descriptor is in; None where it is not to be seen."""
    wanted = number(fd)
    return next((mount for mount in listed() if mount.number == wanted), None)


def make(fd: int, options: str) -> str:
    """A tmpfs on the directory of a descriptor; "" or why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    where = f"/proc/self/fd/{fd}".encode()
    if libc.mount(SOURCE.encode(), where, b"tmpfs", ctypes.c_ulong(_NOSUID_NODEV_NOEXEC), options.encode()):
        return os.strerror(ctypes.get_errno())
    return ""


def uncover(run_fd: int, name: str) -> int:
    """A path descriptor of an entry of the run directory, once everything is detached that is mounted over it and not
    ours. Raises OSError: FileNotFoundError where there is no such entry."""
    run = number(run_fd)
    for _ in range(_COVERS_MAX):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=run_fd)
        try:
            if number(fd) == run or ((mount := own(fd)) is not None and mount.ours):
                return fd
            detach(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise OSError(16, os.strerror(16))


def detach(fd: int) -> None:
    """Take the mount whose root a descriptor is, with all below it, out of the tree now; the kernel ends it when
    nobody uses it any more. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(f"/proc/self/fd/{fd}".encode(), _MNT_DETACH):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
