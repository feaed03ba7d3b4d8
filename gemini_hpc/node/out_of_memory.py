"""Find whether the kernel has ended a process of a rank for want of memory, and at which limit.

The kernel counts such ends for the cgroup of who was ended: the rank, or what the rank has started.
"""

from __future__ import annotations

from gemini_hpc.node import cgroup

_EVENTS = {1: "memory.oom_control", 2: "memory.events"}


class OutOfMemory:
    """The kernel's count for the cgroup of a process, this one without a pid; where there is none, of the machine."""

    def __init__(self, pid: int | str = "self") -> None:
        self._place = cgroup.place(pid)
        here = self._place
        self._path = f"{here.directory()}/{_EVENTS[here.version]}" if here is not None else ""
        if _kills(self._path) is None:
            self._path = "/proc/vmstat"
        self._before = self._kills()

    def _kills(self) -> int:
        return _kills(self._path) or 0

    def begin(self) -> None:
        """Begin an attempt: what was before does not count."""
        self._before = self._kills()

    def happened(self) -> bool:
        """Return whether something here was ended since it began. A cgroup that is gone says nothing."""
        return self._kills() > self._before

    def told(self) -> str:
        """Return the sentence for the user, with the lowest limit on the way up."""
        lowest = cgroup.lowest_limit(self._place) if self._place is not None else None
        return f"out of memory: the limit here is {_amount(lowest[0])}" if lowest else "the node is out of memory"


def _kills(path: str) -> int | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            words = [line.split() for line in file]
    except OSError:
        return None
    return next((int(pair[1]) for pair in words if len(pair) == 2 and pair[0] == "oom_kill"), None)


def _amount(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
