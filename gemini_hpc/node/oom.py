"""The order in which the kernel's OOM killer ends the agents' processes if memory is short.

Agents die before any training. The newest agent without copies dies first, then others without copies, then those
with copies. A supervisor dies last, because it restarts its agent.

The kernel adds the memory that a process has mapped to its score, including copies that it has read. So these
values are only weights. Only root may lower a score. An agent cannot even open its own score file: it is closed to
its owner.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from gemini_hpc.node import cgroup
from gemini_hpc.node.cgroup import AgentCgroup

NEWEST, WITHOUT_COPIES, WITH_COPIES, SUPERVISOR = 1000, 950, 900, 850
_COPIES_BYTES = 1 << 20  # more than the log of an agent without copies


def raise_score() -> None:
    """Make the kernel end children of this process before it ends training. Requires root; slurmd may be exempt."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(NEWEST))


class OwnScore:
    """The OOM score of a supervisor, whose file is opened while the supervisor is root."""

    def __init__(self) -> None:
        self._fd = -1
        with suppress(OSError):
            self._fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        self._write_score(SUPERVISOR)

    def fork(self) -> int:
        """Fork a process that the kernel ends before this one. Return its pid, or 0 in the child.

        Raises:
            OSError: The fork failed.
        """
        self._write_score(NEWEST)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                self._write_score(SUPERVISOR)
        if pid == 0 and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return pid

    def _write_score(self, score: int) -> None:
        with suppress(OSError):
            if self._fd >= 0:
                os.pwrite(self._fd, b"%d" % score, 0)


def lower_scores(groups: Iterable[AgentCgroup]) -> None:
    """Lower the scores of the agents that are older than the newest one. Requires root."""
    for group in groups:
        score = WITH_COPIES if cgroup.read_held_bytes(group) > _COPIES_BYTES else WITHOUT_COPIES
        for pid in cgroup.list_members(group):
            with suppress(OSError, ValueError), open(f"/proc/{pid}/oom_score_adj", "r+b", buffering=0) as file:
                # The open file belongs to one process; the number may have been another's before.
                if int(file.read()) > score and pid in cgroup.list_members(group):
                    os.pwrite(file.fileno(), b"%d" % score, 0)
