"""End of a cluster from any state, without remains."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster import cgroups, lock, processes
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import BUILD, INSIDE, MARKER, ROLE, ROOT, SETTINGS, ClusterFiles
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.node.mounts import list_mounts

# bound inside each cluster, but required to exist outside
MOUNT_POINTS = (INSIDE, SETTINGS)


def create_mount_points() -> None:
    """Create the mount points that all clusters share."""
    for path in MOUNT_POINTS:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)


def list_processes(layout: ClusterFiles) -> list[ProcessId]:
    """Return the processes of a cluster, by the marker in their environment.

    A user may have set the marker in a shell outside. So only three kinds of processes count: those in
    another network namespace, an init that has not yet got there, and the build of the plugin.
    """
    marker, ours = f"{MARKER}={layout.name}", processes.read_namespace("self", "net")
    builders = set(processes.find_by_environment(marker, f"{ROLE}={BUILD}"))
    return [
        process
        for process in processes.find_by_environment(marker)
        if processes.read_namespace(process.pid, "net") not in ("", ours)
        or process in builders
        or _is_init(process.pid)
    ]


def _is_init(pid: int) -> bool:
    try:
        return b"devcluster/init.py\0" in (processes.PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def tear_down(layout: ClusterFiles) -> bool:
    """End every process of the cluster and remove its files; return False if there was nothing to do."""
    with lock.hold_cluster_lock(layout):
        found = _end_processes(layout)
        cgroups.remove(layout)
        if layout.directory.exists():
            found = True
            _refuse_mounts(layout.directory)
            shutil.rmtree(layout.directory)
    _tidy()
    return found


def _end_processes(layout: ClusterFiles) -> bool:
    outer = processes.load_living(layout.outer)
    found = outer is not None
    # The init of a pid namespace ends all processes in it, those of nested namespaces included.
    if outer is not None and not processes.end(outer):
        raise DevclusterError(f"cluster {layout.name}: process {outer.pid} does not end; try again")
    deadline = clock.monotonic() + 10.0
    # Two rounds in a row without strays: a process that was just being forked is seen in the second.
    quiet = 0
    while quiet < 2:
        strays = list_processes(layout)
        quiet = 0 if strays else quiet + 1
        found |= bool(strays)
        for stray in strays:
            processes.end(stray, wait_s=2.0)
        if strays and clock.monotonic() > deadline:
            pids = ", ".join(str(stray.pid) for stray in strays)
            raise DevclusterError(f"cluster {layout.name}: processes {pids} do not end; try again")
    return found


def _refuse_mounts(directory: Path) -> None:
    """Raise DevclusterError for a mount below the directory, whose foreign files would be deleted."""
    below = [mount.point for mount in list_mounts() if Path(mount.point).is_relative_to(directory)]
    if below:
        raise DevclusterError(f"{below[0]} is a mount point on this host: umount it, then try again")


def _tidy() -> None:
    """Remove the directories that clusters share, once the last cluster is gone.

    Removing a mount point earlier would unmount it in a living cluster.
    """
    with lock.try_tidy_lock() as alone:
        if not alone or any(entry.is_dir() for entry in ROOT.iterdir()):
            return
        for path in (*MOUNT_POINTS, ROOT):
            with contextlib.suppress(OSError):
                path.rmdir()
