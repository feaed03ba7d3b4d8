"""Cgroups of the nodes, on a machine with cgroup v1.

Each node has a memory cgroup with slurmd's inside it. It also has one in each other hierarchy in which agents
are placed, or in which Slurm tracks and limits jobs. A node sees its own part as the whole hierarchy. It
never escapes a memory limit that applies to the process that starts the cluster.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster import slurm
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.node import memory_cgroup

MOUNT = "/sys/fs/cgroup/memory"
SLURMD = "slurmd"
BESIDE = tuple(f"/sys/fs/cgroup/{controller}" for controller in ("cpu", "devices", "freezer", "pids"))
REMOVE_TIMEOUT_S = 5.0  # killed processes leave their cgroup within this time
# From this release on, slurmd has not been tried with only a part of a hierarchy.
TRACKED_BEFORE = (23, 11)


def _find_base() -> Path | None:
    """Return the directory of all clusters: the nearest limit that this process has, else the top.

    None means that this machine has no writable v1 memory cgroups.
    """
    place = memory_cgroup.parse_place(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    if place is None or place.version != 1 or place.mount != MOUNT or not place.writable:
        return None
    for directory in place.walk_up():
        with contextlib.suppress(OSError, ValueError):
            limit = Path(directory, memory_cgroup.name_limit_file(1)).read_text()
            if memory_cgroup.compute_free_bytes(1, limit, "0", "") is not None:
                return Path(directory)
    return Path(place.mount)


def _locate_directories(layout: ClusterFiles) -> dict[str, Path]:
    """Return the cluster's directories by mount point, {} if there is none for memory."""
    base = _find_base()
    if base is None:
        return {}
    name = f"gemini-devcluster-{layout.name}"
    return {MOUNT: base / name, **{at: Path(at, name) for at in BESIDE if os.access(f"{at}/cgroup.procs", os.W_OK)}}


def are_possible() -> bool:
    """Return whether nodes get their own memory cgroups here."""
    return _find_base() is not None


def find_tracking_problem() -> str:
    """Return why Slurm cannot track a job's processes by cgroups here, "" if it can."""
    if slurm.read_release() >= TRACKED_BEFORE:
        return f"this has not been tried with Slurm {'.'.join(map(str, slurm.read_release()))}"
    if not are_possible() or not os.access("/sys/fs/cgroup/freezer/cgroup.procs", os.W_OK):
        return "this machine has no writable v1 hierarchies for memory and freezer"
    return ""


def find_node_directories(layout: ClusterFiles, name: str) -> dict[str, str]:
    """Return, by mount point, the directory that the node sees there; {} if it has none of its own."""
    return {at: str(top / name) for at, top in _locate_directories(layout).items() if (top / name).is_dir()}


def make(layout: ClusterFiles, nodes: Sequence[str]) -> None:
    """Make empty cgroups for these nodes, as after a boot."""
    for at, top in _locate_directories(layout).items():
        for name in nodes:
            _remove_tree(top / name)
            with contextlib.suppress(OSError):
                (top / name / SLURMD if at == MOUNT else top / name).mkdir(parents=True)


def remove(layout: ClusterFiles, name: str = "") -> None:
    """Remove the cgroups of one node, or of the whole cluster.

    Their processes have ended, or are about to end.
    """
    for top in _locate_directories(layout).values():
        _remove_tree(top / name)


def _remove_tree(top: Path) -> None:
    deadline = clock.monotonic() + REMOVE_TIMEOUT_S
    while top.is_dir():
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # a process that is just dying is still in it
                os.rmdir(directory)
        if clock.monotonic() > deadline:
            return
        clock.sleep(0.01)


def wrap_for_slurmd(argv: Sequence[str]) -> list[str]:
    """Return a command that begins in slurmd's cgroup, if there is one."""
    procs = f"{MOUNT}/{SLURMD}/cgroup.procs"
    return ["/bin/sh", "-c", f'if [ -w {procs} ]; then echo 0 >{procs}; fi; exec "$@"', "sh", *argv]
