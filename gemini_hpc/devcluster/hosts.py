"""The controller host and the nodes: namespaces, power on, power off."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemini_hpc import clock
from gemini_hpc.devcluster import cgroups, enter, environment, network, processes
from gemini_hpc.devcluster.environment import Mount
from gemini_hpc.devcluster.errors import DevclusterError, read_log_tail
from gemini_hpc.devcluster.layout import (
    INSIDE,
    MARKER,
    SETTINGS,
    ClusterFiles,
    NodeRecord,
    load_record,
    read_rate,
    save_record,
)
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.devcluster.profiles import Profile
from gemini_hpc.node.job_directory import RUN_OPTIONS

# seconds for which a power-off with reset leaves the link up for the dying connections' last packets
RESET_S = 0.2
_CREDENTIALS = struct.Struct("iII")
_SHARED_MEMORY: Mount = ["tmpfs", "/dev/shm", 0o1777]


class Boot:
    """A host (controller host or node) that is being started.

    If the object is closed without `commit`, the host ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        host: str,
        mounts: Sequence[Mount],
        *,
        environment: Mapping[str, str],
        log: Path,
        record: Path | None = None,
    ) -> None:
        """Start the init of a host.

        Args:
            command: Ends in the path of init.py and the cluster's name.
            host: The host's name.
            mounts: The mounts to make, in order.
            environment: The init's environment.
            log: The file for the init's output.
            record: The file in which the init records its own pid and start time, if any.
        """
        self.host = host
        self._log = log
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs, log.open("ab") as output:
            self._launcher = subprocess.Popen(
                [*command, host, str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                cwd="/",
                start_new_session=True,
            )
        spec: dict[str, Any] = {
            "record": str(record) if record else None,
            "booted": record is None,
            "mounts": list(mounts),
        }
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(json.dumps(spec).encode())

    def wait_ready(self, timeout_s: float = 10.0) -> ProcessId:
        """Wait until the mounts are in place; return the init with its pid on this machine."""
        if not select.select([self._channel], [], [], timeout_s)[0]:
            raise DevclusterError(
                f"host {self.host} did not come up within {timeout_s:g} s: {read_log_tail(self._log)}"
            )
        message, ancillary, _, _ = self._channel.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
        if message != b"ready":
            reason = message.decode().removeprefix("error: ") or f"its init ended: {read_log_tail(self._log)}"
            raise DevclusterError(f"host {self.host} did not come up: {reason}")
        self._launcher.wait(timeout_s)
        pid = _CREDENTIALS.unpack(ancillary[0][2][: _CREDENTIALS.size])[0]
        if (found := processes.identify(pid)) is None:
            raise DevclusterError(f"host {self.host} ended at once: {read_log_tail(self._log)}")
        return found

    def commit(self) -> None:
        """Let the host live without this process from now on."""
        self._channel.send(b"commit")
        self._channel.close()

    def close(self) -> None:
        """Close the dialogue; a host without `commit` ends."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(5.0)


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
            ["tmpfs", "/tmp", 0o1777],
            _SHARED_MEMORY,
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
        ["bind", str(layout.locate_tmp(node)), "/tmp", False],
        _SHARED_MEMORY,
        ["run", "/run/gemini-hpc", RUN_OPTIONS],  # as the prolog mounts it if it is not mounted
        ["tmpfs", "/run/gemini-hpc.unprotected", 0o755],
        ["tmpfs", "/run/gemini-hpc.agents", 0o700],
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
            layout.locate_tmp(node).mkdir(exist_ok=True)
            layout.locate_tmp(node).chmod(0o1777)
            argv, env = enter.build_command(layout, outer.pid, [python, "-I", "-S", str(init), layout.name])
            mounts = _list_node_mounts(layout, profile, node)
            mounts += [
                ["bind", own, point, False] for point, own in cgroups.find_node_directories(layout, node).items()
            ]
            boots[node] = Boot(argv, node, mounts, environment=env, log=layout.log / "init.log")
        for node, boot in boots.items():
            found[node] = boot.wait_ready()
            network.plug(outer.pid, node, found[node].pid)
            if rate := read_rate(layout, node):
                network.limit_link(outer.pid, node, found[node].pid, rate)
            save_record(layout.locate_node_record(node), NodeRecord(found[node].pid, found[node].start, rate))
            boot.commit()
    finally:
        for boot in boots.values():
            boot.close()
    return found


def find_init(layout: ClusterFiles, node: str) -> ProcessId | None:
    """Return the init of a node, None if the node is off."""
    return processes.load_living(layout.locate_node_record(node))


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
    if known := load_record(layout.locate_node_record(node), NodeRecord):
        save_record(layout.locate_node_record(node), NodeRecord(known.pid, known.start, rate))
