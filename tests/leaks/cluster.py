"""What jobs have left in a development cluster: memory, processes and files on its nodes, and in Slurm's own state.

Nodes are looked at from outside, through /proc: it takes no command on them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gemini_hpc.devcluster import slurm
from gemini_hpc.devcluster.cluster import Cluster

from . import Found, assert_nothing_new
from .machine import charged

ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
# What ties a job to nodes or to a time; only its owner may have left these.
PINS = {"ReqNodeList": "ReqNodes", "ExcNodeList": "ExcNodes", "Reservation": "Reservation"}
NO_PIN = ("", "(null)", "N/A")
_WIDTH = 120
# What Slurm changes of a job that waits.
CHANGING = {"Priority", "LastSchedEval", "AccrueTime", "Scheduler"}
# This release keeps a node's Reason when the node is idle again after RESUME; the others seen clear it.
KEEPS_REASON = (24, 11)
# An agent that has let go leaves its log for its owner, at most.
# They stay to be read, and go with the job's directory.
JOB_FILES = {"agent.log", *(f"hung-{number}" for number in range(4))}


@contextmanager
def nothing_left(cluster: Cluster, within_s: float) -> Iterator[None]:
    """One test on a shared cluster and its tidying; what an earlier one has left is not told again."""
    before = present(cluster)
    yield
    try:
        assert_nothing_new(before, lambda: present(cluster), within_s)
    except AssertionError as exc:
        exc.add_note(last_words(cluster))
        raise


def last_words(cluster: Cluster, lines: int = 12) -> str:
    """Of processes of ours that are still there: what they do, and the ends of their logs, which may have lost their
    names."""
    where = {os.readlink(f"/proc/{init}/ns/pid"): node for node, init in _inits(cluster).items()}
    said: list[str] = []
    for entry in sorted(filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has just ended
            node = where.get(os.readlink(f"/proc/{entry}/ns/pid"), "")
            command = Path("/proc", entry, "cmdline").read_bytes()
            if not node or (b"gemini_hpc.agent" not in command and b"gemini_hpc.tier" not in command):
                continue
            status = Path("/proc", entry, "status").read_text()
            about = re.findall(r"^(?:PPid|State|Threads):.*", status, re.M)
            waits = Path("/proc", entry, "wchan").read_text()
            said += [f"{node}: process {entry}: {', '.join(about)}, in {waits}"]
            said += Path("/proc", entry, "fd/1").read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(said)


class Bystander:
    """A job of carol's that waits for tomorrow: whatever becomes of others, its request and its times stay."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.id = cluster.submit_job(["-N1", "--begin=now+1day"], user="carol", script="#!/bin/sh\nexec sleep 60\n")
        self._before = self._request()

    def end(self) -> str:
        """Cancel it; says what of it has changed."""
        after = self._request()
        self._cluster.run(["scancel", str(self.id)])
        changed = {k for k in self._before | after if self._before.get(k) != after.get(k)}
        return ", ".join(f"{k}: {self._before.get(k)} -> {after.get(k)}" for k in sorted(changed))

    def _request(self) -> dict[str, str]:
        record = self._cluster.read_job(self.id)
        # Newer releases say "1-1" until they have looked at a job that waits.
        least, _, most = record.get("NumNodes", "").partition("-")
        if least == most:
            record["NumNodes"] = least
        return {key: value for key, value in record.items() if key not in CHANGING}


def held(cluster: Cluster) -> Found:
    """What jobs hold: agents, replica memory, files in /dev/shm, reservations. Nodes without power hold nothing."""
    return _on_nodes(cluster, _inits(cluster)) | _reservations(cluster)


def present(cluster: Cluster) -> Found:
    """What an untouched cluster has not: `held`, jobs that have not ended and their pins, what agents leave below
    /run/gemini-hpc, what the controller keeps of jobs beside their logs, nodes that are not idle or have a reason."""
    inits = _inits(cluster)
    found = _on_nodes(cluster, inits) | _reservations(cluster)
    return found | _job_directories(inits) | _jobs(cluster) | _nodes(cluster) | _controller_files(cluster)


def _inits(cluster: Cluster) -> dict[str, int]:
    return {node: cluster.find_node_pid(node) for node in cluster.node_names if cluster.is_on(node)}


def _show(cluster: Cluster, what: str) -> Iterator[dict[str, str]]:
    """The records of `scontrol show`: words with `=`; a Reason is cut at its first blank."""
    for line in cluster.run(["scontrol", "show", what, "-o"]).stdout.splitlines():
        if record := dict(re.findall(r"(\w+)=(\S*)", line)):
            yield record


def _on_nodes(cluster: Cluster, inits: dict[str, int]) -> Found:
    found: Found = {}
    where: dict[str, str] = {}
    for node, init in inits.items():
        with suppress(OSError):
            where[os.readlink(f"/proc/{init}/ns/pid")] = node
            for name in os.listdir(f"/proc/{init}/root/dev/shm"):
                found[node, "shm", name] = f"{node}: /dev/shm/{name}"
        for cgroup in _cgroups_of_agents(f"/proc/{init}/root/sys/fs/cgroup/memory"):
            if pids := charged(cgroup):
                found[node, "cgroup", cgroup] = f"{node}: processes {pids} in cgroup {cgroup.partition('/memory')[2]}"
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError):  # it has just ended
            node = where.get(os.readlink(f"/proc/{entry}/ns/pid"), "")
            if not node:
                continue
            command = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "gemini_hpc.agent" in command or "gemini_hpc.node" in command:
                found[node, "agent", entry] = f"{node}: process {entry}: {command.strip()}"
            for inode, name in _memfds(entry):
                found[node, "memfd", inode] = f"{node}: {name} in process {entry}: {command.strip()}"
    return found


def _cgroups_of_agents(top: str) -> Iterator[str]:
    """Where a node sees the whole machine's hierarchy, the parts of clusters are left out."""
    for directory, below, _ in os.walk(top):
        below[:] = [name for name in below if not name.startswith("gemini-devcluster-")]
        if "/gemini-hpc" in directory.removeprefix(top):
            yield directory


def _memfds(pid: str) -> Iterator[tuple[int, str]]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            if link.startswith("/memfd:gemini"):
                yield os.stat(f"/proc/{pid}/fd/{fd}").st_ino, link


def _reservations(cluster: Cluster) -> Found:
    records = [r for r in _show(cluster, "reservation") if "ReservationName" in r]
    return {("reservation", r["ReservationName"]): f"reservation {r['ReservationName']}" for r in records}


def _jobs(cluster: Cluster) -> Found:
    found: Found = {}
    fields = ",".join(f"{field}:{_WIDTH}" for field in ("JobID", "State", "StartTime", *PINS.values()))
    # By width: no text of an owner's can pass for a field.
    for line in cluster.run(["squeue", "-h", "-t", "all", "-O", fields]).stdout.splitlines():
        job, state, start, *values = (line[at : at + _WIDTH].strip() for at in range(0, len(line), _WIDTH))
        if state not in ENDED:
            pins = [f"{name}={value}" for name, value in zip(PINS, values, strict=False) if value not in NO_PIN]
            if state == "PENDING":
                pins.append(f"StartTime={start}")
            found["job", job, *pins] = f"job {job} is {state} {' '.join(pins)}".rstrip()
    return found


def _nodes(cluster: Cluster) -> Found:
    found: Found = {}
    for node in _show(cluster, "node"):
        name, state, reason = node.get("NodeName", ""), node.get("State", ""), node.get("Reason", "")
        if state == "IDLE" and slurm.read_release() == KEEPS_REASON:
            reason = ""
        if name and (state != "IDLE" or reason):
            found["node", name, state, reason] = f"node {name} is {state} {reason}".rstrip()
    return found


def _job_directories(inits: dict[str, int]) -> Found:
    found: Found = {}
    for node, init in inits.items():
        run = f"/proc/{init}/root/run/gemini-hpc"
        for directory, _, files in os.walk(run):  # what goes meanwhile is passed over
            for name in files:
                if name not in JOB_FILES:
                    inside = os.path.join(directory, name).replace(run, "/run/gemini-hpc", 1)
                    found[node, "file", inside] = f"{node}: {inside}"
    return found


def _controller_files(cluster: Cluster) -> Found:
    """The event logs of jobs stay for a while; its notes on a job do not outlive it."""
    paths = [p for p in cluster.directory.glob("controller/jobs/*") if p.suffix != ".jsonl"]
    return {("file", path): f"controller: {path.relative_to(cluster.directory)}" for path in paths}
