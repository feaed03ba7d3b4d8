"""The memory limit of a process's cgroup, the lowest on the way up; of both versions."""

from __future__ import annotations

import os

ROOT = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 60  # v1 writes a huge number for none


def memory_cgroups(table: str, root: str = ROOT) -> list[tuple[str, str]]:
    """(directory, name of its limit's file) of a process, from its /proc/PID/cgroup: its own, then those above it."""
    for line in table.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            return _upwards(os.path.join(root, "memory"), path, "memory.limit_in_bytes")
    for line in table.splitlines():
        if line.startswith("0::"):
            return _upwards(root, line[3:], "memory.max")
    return []


def _upwards(top: str, path: str, name: str) -> list[tuple[str, str]]:
    found = []
    parts = [p for p in path.split("/") if p not in ("", "..")]
    for n in range(len(parts), -1, -1):
        found.append((os.path.join(top, *parts[:n]), name))
    return found


def limit(table: str, root: str = ROOT) -> tuple[int, str] | None:
    """(bytes, file that says so) of the lowest limit; None where there is none."""
    lowest: tuple[int, str] | None = None
    for directory, name in memory_cgroups(table, root):
        path = os.path.join(directory, name)
        try:
            with open(path, encoding="ascii", errors="replace") as f:
                text = f.read(64).strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT and (lowest is None or int(text) < lowest[0]):
            lowest = int(text), path
    return lowest
