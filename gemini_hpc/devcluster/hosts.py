"""The controller host and the nodes: namespaces, power on, power off."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster import cgroups, enter, environment, munge, network, processes, record
from gemini_hpc.devcluster.boot import Boot, Mount
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import INSIDE, MARKER, SETTINGS, ClusterFiles
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.devcluster.profiles import Profile
from gemini_hpc.devcluster.record import NodeRecord
from gemini_hpc.devcluster.requirements import find_program
from gemini_hpc.devcluster.slurmconf import SLURMCTLD_PORT
from gemini_hpc.node.job_directory import RUN_OPTIONS

# seconds for which a power-off with reset leaves the link up for the dying connections' last packets
RESET_S = 0.2
_TMPFS: list[Mount] = [["tmpfs", "/tmp", 0o1777], ["tmpfs", "/dev/shm", 0o1777]]


def boot_controller(layout: ClusterFiles, python: list[Mount]) -> tuple[Boot, ProcessId]:
    """Start the controller host, whose init encloses all nodes: its death ends the whole cluster."""
    etc: list[Mount] = [
        ["bind", str(layout.etc / name), f"/etc/{name}", True] for name in ("passwd", "group", "hosts")
    ]
    etc.append(["bind", str(layout.settings), str(SETTINGS), False])
    if os.path.isdir("/etc/slurm"):
        etc.append(["bind", str(layout.slurm_etc), "/etc/slurm", False])
    boot = Boot(
        [sys.executable, "-I", "-S", str(environment.locate_package() / environment.INIT), layout.name],
        network.CONTROLLER,
        [
            # first, because the environment may itself lie below /tmp
            *python,
            *etc,
            *_TMPFS,
            ["tmpfs", "/run", 0o755],
            ["mkdir", "/run/lock", 0o1777],
            ["mkdir", "/run/munge", 0o755],
            ["mkdir", "/run/slurm", 0o755],
            ["mkdir", "/run/gemini-hpc", 0o755],
            ["mkdir", "/run/gemini-hpc.unprotected", 0o755],
            ["mkdir", "/run/gemini-hpc.agents", 0o700],
            ["proc"],
        ],
        environment={MARKER: layout.name},
        log=layout.log / "init.log",
        record=layout.outer,
    )
    try:
        return boot, boot.wait_ready()
    except BaseException:
        boot.close()
        raise


def _list_node_mounts(layout: ClusterFiles, profile: Profile, node: str) -> list[Mount]:
    mounts: list[Mount] = [
        *_TMPFS,
        ["run", "/run/gemini-hpc", RUN_OPTIONS],  # as the prolog mounts it if it is not mounted
        ["tmpfs", "/run/gemini-hpc.unprotected", 0o755],
        ["tmpfs", "/run/gemini-hpc.agents", 0o700],
        ["tmpfs", str(layout.spool), 0o755],
    ]
    if profile.munge_per_node:
        mounts.append(["tmpfs", "/run/munge", 0o755])
    if profile.configless:
        hidden = [layout.slurm_etc, *([Path("/etc/slurm")] if os.path.isdir("/etc/slurm") else [])]
        mounts += [["tmpfs", str(path), 0o755] for path in (*hidden, "/run/slurm")]
    return [
        *mounts,
        ["proc"],
        # All nodes share one kernel, but a node gets a new boot id with each power-on.
        ["bind", str(layout.locate_boot_id(node)), "/proc/sys/kernel/random/boot_id", True],
    ]


def boot_nodes(
    layout: ClusterFiles, outer: ProcessId, profile: Profile, nodes: Sequence[str]
) -> dict[str, ProcessId]:
    """Switch several nodes on at once: namespaces and link, without daemons."""
    python = environment.find_interpreter()
    if python.startswith(f"{sys.prefix}/"):
        python = str(INSIDE / "base" / os.path.relpath(python, sys.prefix))
    init = INSIDE / "src" / "gemini_hpc" / environment.INIT
    cgroups.make(layout, nodes)
    boots: dict[str, Boot] = {}
    found: dict[str, ProcessId] = {}
    try:
        for node in nodes:
            layout.locate_boot_id(node).write_text(f"{uuid.uuid4()}\n")
            argv, env = enter.build_command(layout, outer.pid, [python, "-I", "-S", str(init), layout.name])
            mounts = _list_node_mounts(layout, profile, node)
            mounts += [
                ["bind", own, point, False] for point, own in cgroups.find_node_directories(layout, node).items()
            ]
            boots[node] = Boot(argv, node, mounts, environment=env, log=layout.log / "init.log")
        for node, boot in boots.items():
            found[node] = boot.wait_ready()
            network.plug(outer.pid, node, found[node].pid)
            known = record.load_node(layout, node)
            rate = known.rate if known else None
            if rate:
                network.limit_link(outer.pid, node, found[node].pid, rate)
            record.save(layout.locate_node_record(node), NodeRecord(found[node].pid, found[node].start, rate))
            boot.commit()
    finally:
        for boot in boots.values():
            boot.close()
    return found


def start_daemons(layout: ClusterFiles, profile: Profile, nodes: dict[str, ProcessId]) -> None:
    """Start munged, if each node has its own, and slurmd, on several nodes at once.

    The slurmds have read their configuration when the function returns.
    """
    if profile.munge_per_node:
        munge.start(layout, nodes)
    source = ["-f", str(layout.slurm_conf)]
    if profile.configless:
        source = ["--conf-server", f"{network.CONTROLLER}:{SLURMCTLD_PORT}"]
    argv = [find_program("slurmd"), *source, "-N"]
    started = {
        node: enter.start_command(
            enter.build_command(
                layout, process.pid, cgroups.wrap_for_slurmd([*argv, node]), configless=profile.configless
            )
        )
        for node, process in nodes.items()
    }
    for node, process in started.items():
        done = enter.complete(process, None, 20.0)
        if done.returncode:
            raise DevclusterError(f"slurmd did not start on {node}: {' '.join(done.stderr.split())}")


def find_init(layout: ClusterFiles, node: str) -> ProcessId | None:
    """Return the init of a node, None if the node is off."""
    known = record.load_node(layout, node)
    process = ProcessId(known.pid, known.start) if known else None
    return process if process and processes.is_alive(process) else None


def cut_power(layout: ClusterFiles, outer: ProcessId, node: str, process: ProcessId, reset: bool) -> None:
    """Cut the power of a node.

    Without `reset` the link is removed first, so peers receive nothing. With `reset` the processes end first.
    The kernel closes their connections then, and peers receive that.
    """
    if not reset:
        network.unplug(outer.pid, node)
        _end_init(node, process)
        cgroups.remove(layout, node)
        return
    # The network namespace must outlive its last process: otherwise the link ends before the packets are
    # sent.
    keep = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _end_init(node, process)
        clock.sleep(RESET_S)
        network.unplug(outer.pid, node)
    finally:
        os.close(keep)
    cgroups.remove(layout, node)


def _end_init(node: str, process: ProcessId) -> None:
    if not processes.end(process):
        raise DevclusterError(f"node {node}: process {process.pid} does not end; try again")


def set_rate(layout: ClusterFiles, node: str, rate: str | None) -> None:
    """Record a link's limit, so that it is set again at the next power-on."""
    known = record.load_node(layout, node)
    if known is not None:
        record.save(layout.locate_node_record(node), NodeRecord(known.pid, known.start, rate))
