"""The check whether the kernel killed a process of a rank for lack of memory, and at which limit.

The kernel counts such kills for the cgroup of the killed process: the rank, or a process that the rank started.
"""

from __future__ import annotations

from gemini_hpc.node import cgroup

_EVENTS = {1: "memory.oom_control", 2: "memory.events"}
_MACHINE = "/proc/vmstat"


class OutOfMemory:
    """The kernel's counts of OOM kills around a process, by default this process.

    Slurm removes a step's cgroup as soon as its last process is gone, often before a reader comes. The next
    readable count decides then. On v2, the nearest cgroup above also counts kills below it. On v1, the next is the
    count of the whole node, which may belong to another job. The limit is that of the attempt's begin.
    """

    def __init__(self, pid: int | str = "self") -> None:
        self._place = cgroup.find_place(pid)
        place = self._place
        directories = list(place.walk_up()) if place is not None else []
        if place is not None and place.version == 1:
            directories = directories[:1]
        self._paths = [f"{directory}/{_EVENTS[place.version]}" for directory in directories if place is not None]
        self._paths.append(_MACHINE)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Begin an attempt: earlier kills do not count."""
        counts = ((path, _read_kills(path)) for path in self._paths)
        self._before = {path: count for path, count in counts if count is not None}
        self._lowest = cgroup.find_lowest_limit(self._place) if self._place is not None else None

    def has_happened(self) -> bool:
        """Return whether a process was killed since `begin_attempt`."""
        for path, before in self._before.items():
            if (count := _read_kills(path)) is not None:
                return count > before
        return False

    def describe_kill(self) -> str:
        """Return the sentence for the user, with the lowest limit on the way up."""
        if self._lowest is None:
            return "the node is out of memory"
        return f"out of memory: the limit here is {_format_size(self._lowest[0])}"


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
