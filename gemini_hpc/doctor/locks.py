"""The holder of a lock on a file, and the file system of a path.

On some file systems stat's device number answers neither question. On btrfs it is a subvolume's own number,
and on overlayfs that of a layer. /proc/locks has the number of the file system's super block instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress

from gemini_hpc.node.mounts import parse_mountinfo

_HELD = re.compile(r"^lock:\s+[0-9]+: FLOCK\s+ADVISORY\s+WRITE\s", re.M)
_MAX_BYTES = 16 << 20


def holds_lock(pid: int, info: os.stat_result) -> bool:
    """Return whether a process has this file open and locked; False if its descriptors are not visible."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if not os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), info):
                    continue
                with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as f:
                    if _HELD.search(f.read(1 << 16)):
                        return True
    return False


def find_pids_by_inode(info: os.stat_result, locks: str) -> list[int]:
    """Return the pids in the text of /proc/locks that hold such a lock on a file of this inode number.

    The file may be on any file system. A pid of 0 is one that is not visible from here.
    """
    found = []
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1:4] != ["FLOCK", "ADVISORY", "WRITE"]:
            continue
        if fields[5].rpartition(":")[2] == str(info.st_ino):
            found.append(max(0, int(fields[4])))
    return found


def find_holder(path: str, candidates: Iterable[int]) -> int | None:
    """Return the pid of the process that holds a lock on `path`.

    The result is 0 if the holder is not visible from here, and None if there is none. `candidates` are
    possible holders, the likely ones first. Raises `FileNotFoundError`, OSError.
    """
    info = os.stat(path)
    with open("/proc/locks", encoding="ascii", errors="replace") as f:
        pids = find_pids_by_inode(info, f.read(_MAX_BYTES))
    for pid in dict.fromkeys((*candidates, *filter(None, pids))):
        if holds_lock(pid, info):
            return pid
    # Not root: others' descriptors are hidden from us, so the inode number alone must suffice.
    closed = [pid for pid in pids if pid == 0 or not _is_visible(pid)]
    return closed[0] if closed else None


def _is_visible(pid: int) -> bool:
    try:
        os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def find_file_system(path: str, mounts: str = "") -> str:
    """Return the identity of the file system of `path`: its device in /proc/self/mountinfo.

    The device is the same for all subvolumes. `mounts` is the text of mountinfo, for tests. Raises OSError if
    `path` does not exist.
    """
    real = os.path.realpath(path, strict=True)
    if not mounts:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
            mounts = f.read(_MAX_BYTES)
    best, device = "", ""
    for mount in parse_mountinfo(mounts):
        within = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if within and len(mount.point) >= len(best):  # a later mount at the same place covers the earlier one
            best, device = mount.point, mount.device
    return device
