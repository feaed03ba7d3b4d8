"""Ends a cluster from whatever state it is in, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster import cgroups, lock, processes
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import BUILD, INSIDE, MARKER, ROLE, ROOT, SETTINGS, Layout
from gemini_hpc.devcluster.processes import ProcessId

# Bound inside each cluster, but they have to exist outside.
MOUNT_POINTS = (INSIDE, SETTINGS)


def create_mount_points() -> None:
    for path in MOUNT_POINTS:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)


def members(layout: Layout) -> list[ProcessId]:
    """Processes of a cluster, by the marker in their environment.

    A user may have the marker set in a shell outside: only what lives in another network namespace counts, an
    init that has not yet got there, and the building of the plugin.
    """
    marker, ours = f"{MARKER}={layout.name}", processes.namespace("self", "net")
    builders = set(processes.with_environment(marker, f"{ROLE}={BUILD}"))
    return [
        process
        for process in processes.with_environment(marker)
        if processes.namespace(process.pid, "net") not in ("", ours) or process in builders or _is_init(process.pid)
    ]


def _is_init(pid: int) -> bool:
    try:
        return b"devcluster/init.py\0" in (processes.PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def down(layout: Layout) -> bool:
    """End every process of the cluster and remove its files. False if there was nothing to do."""
    with lock.cluster(layout):
        found = _end_processes(layout)
        cgroups.remove(layout)
        if layout.directory.exists():
            found = True
            _refuse_mounts(layout.directory)
            shutil.rmtree(layout.directory)
    _tidy()
    return found


def _end_processes(layout: Layout) -> bool:
    found = False
    outer = processes.load(layout.outer)
    if outer is not None and processes.is_alive(outer):
        found = True
        # The init of a pid namespace takes all others with it, those of the nested namespaces too.
        if not processes.end(outer):
            raise DevclusterError(f"cluster {layout.name}: process {outer.pid} does not end; try again")
    deadline = clock.monotonic() + 10.0
    # Twice in a row without any: one that was just being forked is seen the second time.
    quiet = 0
    while quiet < 2:
        strays = members(layout)
        quiet = 0 if strays else quiet + 1
        found |= bool(strays)
        for stray in strays:
            processes.end(stray, wait_s=2.0)
        if strays and clock.monotonic() > deadline:
            pids = ", ".join(str(stray.pid) for stray in strays)
            raise DevclusterError(f"cluster {layout.name}: processes {pids} do not end; try again")
    return found


def _refuse_mounts(directory: Path) -> None:
    """A mount below the directory would have its files deleted, and they are not the cluster's."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    below = [mount for mount in mounts if Path(mount).is_relative_to(directory)]
    if below:
        raise DevclusterError(f"{below[0]} is a mount point on this host: umount it, then try again")


def _tidy() -> None:
    """Remove what clusters share once the last of them is gone. A mount point that is removed would be
    unmounted in a living cluster."""
    with lock.tidying() as alone:
        if not alone or any(entry.is_dir() for entry in ROOT.iterdir()):
            return
        for path in (*MOUNT_POINTS, ROOT):
            with contextlib.suppress(OSError):
                path.rmdir()
