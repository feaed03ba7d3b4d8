"""The mounts at and below an entry of the run directory, examined without a request to a user's file system.

A user may mount a file system of their own (FUSE) over their directory, and its server need not answer. Any process
that accesses it then hangs, even root's. A descriptor opened with O_PATH sends no request to the server, and still
identifies its mount.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

SOURCE = "gemini-hpc"
_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_MNT_DETACH = 2
_COVERS_MAX = 64
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo.

    Attributes:
        number: The kernel's number of the mount.
        point: Mount point.
        kind: Type of the file system.
        source: What is mounted.
        device: Device of the file system, as `major:minor`.
        root: Directory within the file system that is mounted.
        options: Options of the mount and of the file system.
    """

    number: int
    point: str
    kind: str
    source: str
    device: str = ""
    root: str = "/"
    options: frozenset[str] = frozenset()

    @property
    def ours(self) -> bool:
        """Return whether root's prolog made this mount. Users cannot mount this type."""
        return self.kind == "tmpfs" and self.source == SOURCE


def list_mounts() -> list[Mount]:
    """Return all mounts visible from here, oldest first."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
        return list(parse_mountinfo(f.read()))


def parse_mountinfo(text: str) -> Iterator[Mount]:
    """Yield the mounts in the text of /proc/PID/mountinfo, oldest first."""
    for line in text.split("\n"):  # users choose some names, and other line ends are part of those
        left, _, right = line.partition(" - ")
        fields, of = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(of) < 3 or not fields[0].isdecimal():
            continue
        options = frozenset((*fields[5].split(","), *of[2].split(",")))
        number, device = int(fields[0]), fields[2]
        root, point, source = (_decode_octal(name) for name in (fields[3], fields[4], of[1]))
        yield Mount(number, point, of[0], source, device, root, options)


def _decode_octal(text: str) -> str:
    return _OCTAL.sub(lambda m: chr(int(m[1], 8)), text)


def read_mount_number(fd: int) -> int:
    """Return the kernel's number of a descriptor's mount. No server gets a request."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as f:
        return next((int(line.split()[1]) for line in f if line.startswith("mnt_id:")), -1)


def find_mount(fd: int) -> Mount | None:
    """Return the mount of a descriptor, or None if it is not visible."""
    wanted = read_mount_number(fd)
    return next((mount for mount in list_mounts() if mount.number == wanted), None)


def mount_tmpfs(fd: int, options: str) -> str:
    """Mount a tmpfs on the directory of a descriptor. Return "", or the error."""
    libc = ctypes.CDLL(None, use_errno=True)
    where = f"/proc/self/fd/{fd}".encode()
    if libc.mount(SOURCE.encode(), where, b"tmpfs", ctypes.c_ulong(_NOSUID_NODEV_NOEXEC), options.encode()):
        return os.strerror(ctypes.get_errno())
    return ""


def uncover(run_fd: int, name: str) -> int:
    """Return a path descriptor of an entry of the run directory, after detaching all foreign mounts over it.

    Raises:
        FileNotFoundError: There is no such entry.
        OSError: A mount could not be detached.
    """
    run = read_mount_number(run_fd)
    for _ in range(_COVERS_MAX):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=run_fd)
        try:
            if read_mount_number(fd) == run or ((mount := find_mount(fd)) is not None and mount.ours):
                return fd
            detach(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise OSError(16, os.strerror(16))


def detach(fd: int) -> None:
    """Detach the mount whose root is `fd`, with all mounts below it.

    The mount leaves the tree at once. The kernel ends it when its last user is gone.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(f"/proc/self/fd/{fd}".encode(), _MNT_DETACH):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
