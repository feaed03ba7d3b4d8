"""Which of the agents' processes the kernel ends first where memory is short: before any training, and among
themselves the newest agent without copies, then others without copies, then those with some. A supervisor comes last,
for it starts its agent again.

The kernel adds what a process has mapped to its score, copies that it has read included; so these are weights. Only
root may lower a score. An agent cannot even open its own: it is closed to its owner.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from gemini_hpc.node import cgroup
from gemini_hpc.node.cgroup import Group

NEWEST, WITHOUT_COPIES, WITH_COPIES, SUPERVISOR = 1000, 950, 900, 850
_COPIES_BYTES = 1 << 20  # more than the log of an agent that holds nothing


def offer() -> None:
    """Have the kernel end what this process starts before it ends training. By root; slurmd may be exempt."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(NEWEST))


class OwnScore:
    """The score of a supervisor, opened while it is root's."""

    def __init__(self) -> None:
        self._fd = -1
        with suppress(OSError):
            self._fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        self._set(SUPERVISOR)

    def fork(self) -> int:
        """Fork a process that is ended before this one is; the pid, or 0 in it. Raises `OSError`."""
        self._set(NEWEST)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                self._set(SUPERVISOR)
        if pid == 0 and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return pid

    def _set(self, score: int) -> None:
        with suppress(OSError):
            if self._fd >= 0:
                os.pwrite(self._fd, b"%d" % score, 0)


def rank(groups: Iterable[Group]) -> None:
    """Lower the scores of agents that were there before the newest one. By root."""
    for group in groups:
        score = WITH_COPIES if cgroup.held_bytes(group) > _COPIES_BYTES else WITHOUT_COPIES
        for pid in cgroup.members(group):
            with suppress(OSError, ValueError), open(f"/proc/{pid}/oom_score_adj", "r+b", buffering=0) as file:
                # What is open is one process's; its number may have been another's before.
                if int(file.read()) > score and pid in cgroup.members(group):
                    os.pwrite(file.fileno(), b"%d" % score, 0)
