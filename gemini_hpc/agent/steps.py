"""Which jobs have a step on this node, without asking slurmd."""

from __future__ import annotations

import os
import re

_TITLE = re.compile(rb"slurmstepd: \[(\d{1,10})\.")


def jobs_with_steps() -> set[int]:
    """Those of which a slurmstepd runs here: a process of root's with the title `slurmstepd: [JOB.STEP]`."""
    found = set[int]()
    for pid in os.listdir("/proc"):
        if not pid.isdecimal():
            continue
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                titled = _TITLE.match(f.read(64))
            if titled and _started_by_root(pid):
                found.add(int(titled[1]))
        except OSError:
            continue
    return found


def _started_by_root(pid: str) -> bool:
    """Its real uid: anybody can give a process any title, and slurmstepd is its job's owner for moments."""
    with open(f"/proc/{pid}/status", "rb") as f:
        return re.search(rb"^Uid:\t0\t", f.read(4096), re.MULTILINE) is not None
