"""The check whether the kernel killed a process of a rank for lack of memory, and at which limit.

The kernel counts such kills for the cgroup of the killed process: the rank, or a process that the rank started.
"""

from __future__ import annotations

from gemini_hpc.node import cgroup

_EVENTS = {1: "memory.oom_control", 2: "memory.events"}


class OutOfMemory:
    """The kernel's count of OOM kills in a process's cgroup, by default this process's.

    Without a cgroup, the count of the whole node is used.
    """

    def __init__(self, pid: int | str = "self") -> None:
        self._place = cgroup.find_place(pid)
        place = self._place
        self._path = f"{place.locate_directory()}/{_EVENTS[place.version]}" if place is not None else ""
        if _read_kills(self._path) is None:
            self._path = "/proc/vmstat"
        self._before = self._count_kills()

    def _count_kills(self) -> int:
        return _read_kills(self._path) or 0

    def begin_attempt(self) -> None:
        """Begin an attempt: earlier kills do not count."""
        self._before = self._count_kills()

    def has_happened(self) -> bool:
        """Return whether a process was killed since `begin_attempt`. A cgroup that is gone reports no kills."""
        return self._count_kills() > self._before

    def describe_kill(self) -> str:
        """Return the sentence for the user, with the lowest limit on the way up."""
        lowest = cgroup.find_lowest_limit(self._place) if self._place is not None else None
        return (
            f"out of memory: the limit here is {_format_size(lowest[0])}" if lowest else "the node is out of memory"
        )


def _read_kills(path: str) -> int | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            words = [line.split() for line in file]
    except OSError:
        return None
    return next((int(pair[1]) for pair in words if len(pair) == 2 and pair[0] == "oom_kill"), None)


def _format_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
