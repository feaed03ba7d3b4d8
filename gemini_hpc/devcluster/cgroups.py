"""A memory cgroup for each node, with slurmd's inside it, where this machine has cgroup v1.

A node sees its own part as the whole hierarchy. It never leaves a memory limit that the cluster's maker has.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from gemini_hpc.core import cgroup
from gemini_hpc.devcluster.layout import Layout

MOUNT = "/sys/fs/cgroup/memory"
SLURMD = "slurmd"
REMOVE_TIMEOUT_S = 5.0


def _base() -> Path | None:
    """Where clusters are put: below the nearest limit that this process has, else at the top."""
    here = cgroup.place(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    if here is None or here.version != 1 or here.mount != MOUNT or not here.writable:
        return None
    for directory in here.chain():
        with contextlib.suppress(OSError, ValueError):
            limit = Path(directory, cgroup.limit_file(1)).read_text()
            if cgroup.left(1, limit, "0", "") is not None:
                return Path(directory)
    return Path(here.mount)


def _cluster(layout: Layout) -> Path | None:
    base = _base()
    return None if base is None else base / f"gemini-devcluster-{layout.name}"


def possible() -> bool:
    """Whether nodes get memory cgroups of their own here."""
    return _base() is not None


def node(layout: Layout, name: str) -> Path | None:
    """What the node sees as `MOUNT`; None where it has nothing of its own."""
    top = _cluster(layout)
    return top / name if top is not None and (top / name).is_dir() else None


def make(layout: Layout, nodes: Sequence[str]) -> None:
    """Empty cgroups for these nodes, as after a boot."""
    top = _cluster(layout)
    for name in nodes if top is not None else ():
        assert top is not None
        _remove(top / name)
        with contextlib.suppress(OSError):
            (top / name / SLURMD).mkdir(parents=True)


def remove(layout: Layout, name: str = "") -> None:
    """Of one node, or of the whole cluster; its processes have ended, or are about to."""
    top = _cluster(layout)
    if top is not None:
        _remove(top / name)


def _remove(top: Path) -> None:
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while top.is_dir():
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # a process that is just dying is still in it
                os.rmdir(directory)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def into_slurmds(argv: Sequence[str]) -> list[str]:
    """A command that begins in slurmd's cgroup, where there is one."""
    procs = f"{MOUNT}/{SLURMD}/cgroup.procs"
    return ["/bin/sh", "-c", f'if [ -w {procs} ]; then echo 0 >{procs}; fi; exec "$@"', "sh", *argv]
