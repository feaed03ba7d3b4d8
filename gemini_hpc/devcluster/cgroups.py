"""A memory cgroup for each node, with slurmd's inside it, where this machine has cgroup v1; and one in each other
hierarchy that agents are put in, or that Slurm tracks and limits jobs in.

A node sees its own part as the whole hierarchy. It never leaves a memory limit that the cluster's maker has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster import slurm
from gemini_hpc.devcluster.layout import Layout
from gemini_hpc.node import memory_cgroup

MOUNT = "/sys/fs/cgroup/memory"
SLURMD = "slurmd"
BESIDE = tuple(f"/sys/fs/cgroup/{controller}" for controller in ("cpu", "devices", "freezer", "pids"))
REMOVE_TIMEOUT_S = 5.0
# From this release on it has not been tried whether a part of a hierarchy is enough for slurmd.
TRACKED_BEFORE = (23, 11)


def _base() -> Path | None:
    """Where clusters are put: below the nearest limit that this process has, else at the top."""
    here = memory_cgroup.place(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    if here is None or here.version != 1 or here.mount != MOUNT or not here.writable:
        return None
    for directory in here.chain():
        with contextlib.suppress(OSError, ValueError):
            limit = Path(directory, memory_cgroup.limit_file(1)).read_text()
            if memory_cgroup.left(1, limit, "0", "") is not None:
                return Path(directory)
    return Path(here.mount)


def _clusters(layout: Layout) -> dict[str, Path]:
    """By mount point, where the cluster's are; nothing where memory has none."""
    base = _base()
    if base is None:
        return {}
    name = f"gemini-devcluster-{layout.name}"
    return {MOUNT: base / name, **{at: Path(at, name) for at in BESIDE if os.access(f"{at}/cgroup.procs", os.W_OK)}}


def possible() -> bool:
    """Whether nodes get memory cgroups of their own here."""
    return _base() is not None


def untracked() -> str:
    """Return why Slurm cannot track a job's processes by cgroups here, "" where it can."""
    if slurm.release() >= TRACKED_BEFORE:
        return f"this has not been tried with Slurm {'.'.join(map(str, slurm.release()))}"
    if not possible() or not os.access("/sys/fs/cgroup/freezer/cgroup.procs", os.W_OK):
        return "this machine has no writable v1 hierarchies for memory and freezer"
    return ""


def node(layout: Layout, name: str) -> dict[str, str]:
    """By mount point, what the node sees there; empty where it has nothing of its own."""
    return {at: str(top / name) for at, top in _clusters(layout).items() if (top / name).is_dir()}


def make(layout: Layout, nodes: Sequence[str]) -> None:
    """Empty cgroups for these nodes, as after a boot."""
    for at, top in _clusters(layout).items():
        for name in nodes:
            _remove(top / name)
            with contextlib.suppress(OSError):
                (top / name / SLURMD if at == MOUNT else top / name).mkdir(parents=True)


def remove(layout: Layout, name: str = "") -> None:
    """Of one node, or of the whole cluster; its processes have ended, or are about to."""
    for top in _clusters(layout).values():
        _remove(top / name)


def _remove(top: Path) -> None:
    deadline = clock.monotonic() + REMOVE_TIMEOUT_S
    while top.is_dir():
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # a process that is just dying is still in it
                os.rmdir(directory)
        if clock.monotonic() > deadline:
            return
        clock.sleep(0.01)


def into_slurmds(argv: Sequence[str]) -> list[str]:
    """A command that begins in slurmd's cgroup, where there is one."""
    procs = f"{MOUNT}/{SLURMD}/cgroup.procs"
    return ["/bin/sh", "-c", f'if [ -w {procs} ]; then echo 0 >{procs}; fi; exec "$@"', "sh", *argv]
