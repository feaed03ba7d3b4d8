"""The jobs that have a step on this node, found without slurmd.

Root does not read even the command line of a user's process: the line lies in memory that the user can make hang.
"""

from __future__ import annotations

import os
import re

_TITLE = re.compile(rb"slurmstepd: \[(\d{1,10})\.")


def find_jobs_with_steps() -> set[int]:
    """Return the jobs with a slurmstepd here: a process of root's with the title `slurmstepd: [JOB.STEP]`."""
    found = set[int]()
    for pid in os.listdir("/proc"):
        if not pid.isdecimal():
            continue
        try:
            if not has_real_uid(pid, 0):
                continue
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                titled = _TITLE.match(f.read(64))
            if titled:
                found.add(int(titled[1]))
        except OSError:
            continue
    return found


def has_real_uid(pid: str, uid: int) -> bool:
    """Return whether the process has `uid` as its real uid.

    The real uid decides: any process can give itself any title, and slurmstepd briefly runs as its job's owner.

    Raises:
        OSError: The process is gone.
    """
    with open(f"/proc/{pid}/status", "rb") as f:
        return re.search(rb"^Uid:\t%d\t" % uid, f.read(4096), re.MULTILINE) is not None
