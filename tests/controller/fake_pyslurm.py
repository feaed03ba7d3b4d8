"""A module of pyslurm's shape, for the worker in tests: PyPI has the real one for Slurm 25.11 only.

The attributes are those of pyslurm 22.5, 24.11 and 25.11, its values those of the cluster, which it asks with Slurm's
commands. A file `mode` beside it makes it behave badly.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

__version__ = "0.0.fake"
_MODE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mode")


def _mode() -> str:
    try:
        with open(_MODE, encoding="utf-8") as f:
            return f.read()
    except FileNotFoundError:
        return ""


if _mode() == "exit at import":  # as the real one does where it finds no configuration
    os._exit(1)
if _mode() == "hang at import":
    time.sleep(600)


class PyslurmError(Exception):
    """The base of its errors."""


class RPCError(PyslurmError):
    """Slurm said no."""


def _run(*argv: str) -> str:
    mode = _mode()
    if mode == "hang":
        time.sleep(600)
    if mode == "die":
        os._exit(139)
    if mode == "print":
        os.write(1, b'{"id": 1, "value": "printed by the library"}\n')
    if mode == "raise":
        raise RuntimeError("something else")
    if mode == "not utf-8":
        b"\xff".decode()
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "TZ": "UTC"})
    if done.returncode:
        raise RPCError(done.stderr.strip().rpartition("error: ")[2])
    return done.stdout


def _stamp(text: str) -> int | None:
    import calendar

    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _none(text: str) -> str | None:
    return None if text in ("", "(null)", "N/A", "None", "n/a") else text


_FIELDS = (
    *("JobID", "ArrayJobID", "ArrayTaskID", "HetJobID", "State", "Reason", "UserID", "UserName", "NodeList"),
    *("ReqNodes", "NumNodes", "RestartCnt", "Requeue", "BatchFlag", "Partition", "Reservation"),
    *("Feature", "MinCpus", "MinMemory", "StartTime", "EndTime", "exit_code"),
)


class Job:
    """pyslurm.Job."""

    def __init__(self, job_id: int) -> None:
        self.id = job_id

    @staticmethod
    def load(job_id: int) -> Job:
        """One job."""
        out = _run(
            "squeue", "-h", "-a", "-t", "all", "-j", str(job_id), "-O", ",".join(f"{f}:0\x01" for f in _FIELDS)
        )
        rows = [dict(zip(_FIELDS, row.split("\x01"), strict=False)) for row in out.split("\x01\n") if row.strip()]
        row = next((r for r in rows if r["JobID"] == str(job_id)), None)
        if row is None:
            raise RPCError("Invalid job id specified")
        exc = _run("squeue", "-h", "-a", "-t", "all", "-j", str(job_id), "-o", "%A|%x|").split("|")
        job = Job(job_id)
        task = _none(row["ArrayTaskID"])
        one = task is not None and task.isdigit()
        status = int(row["exit_code"]) if row["exit_code"].isdigit() else int(row["exit_code"].split(":")[0]) << 8
        values: dict[str, Any] = {
            "array_id": int(row["ArrayJobID"]) if task else None,
            "array_task_id": int(task) if task and one else None,
            "array_tasks_waiting": task.partition("%")[0] if task and not one else None,
            "heterogeneous_id": int(_none(row["HetJobID"]) or 0),
            "state": row["State"],
            "state_reason": row["Reason"],
            "user_id": int(row["UserID"]),
            "user_name": row["UserName"],
            "allocated_nodes": _none(row["NodeList"]),
            "required_nodes": _none(row["ReqNodes"]),
            "excluded_nodes": _none(dict(zip((e.strip() for e in exc[::2]), exc[1::2], strict=False))[str(job_id)]),
            "num_nodes": int(row["NumNodes"].split("-")[0]),
            "requeue_count": int(row["RestartCnt"]),
            "is_requeueable": row["Requeue"] == "1",
            "is_batch_job": row["BatchFlag"] == "1",
            "partition": row["Partition"],
            "reservation": _none(row["Reservation"]),
            "constraints": (_none(row["Feature"]) or "").split(",") if _none(row["Feature"]) else [],
            "min_cpus_per_node": int(row["MinCpus"]),
            "memory_per_node": None,
            "memory_per_cpu": int(row["MinMemory"].rstrip("Mcn")),
            "start_time": _stamp(row["StartTime"]),
            "end_time": _stamp(row["EndTime"]),
            "exit_code": status >> 8,
            "exit_code_signal": status & 127,
            "gres_per_node": {},
        }
        vars(job).update(values)
        return job

    def requeue(self, hold: bool = False) -> None:
        """Back to pending."""
        _run("scontrol", "requeue", str(self.id))


class Node:
    """pyslurm.Node."""

    def __init__(self, name: str = "", state: str = "", reason: str = "") -> None:
        self.name, self.state, self.reason = name, state, reason

    @staticmethod
    def load(name: str) -> Node:
        """One node."""
        return Nodes.load(name)[name]

    def modify(self, changes: Node) -> None:
        """Change it."""
        reason = [f"Reason={changes.reason}"] if changes.reason else []
        _run("scontrol", "update", f"NodeName={self.name}", f"State={changes.state}", *reason)


class Nodes(dict[str, Node]):
    """pyslurm.Nodes."""

    @staticmethod
    def load(name: str = "") -> Nodes:
        """All nodes."""
        found = Nodes()
        for line in _run("scontrol", "show", "node", "-o", *([name] if name else [])).splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            said, _, who = line.partition(" Reason=")[2].partition(" [")
            user, _, at = who.rstrip("] ").partition("@")
            node = Node(fields["NodeName"], fields["State"])
            values = {
                "address": fields["NodeAddr"],
                "hostname": fields["NodeHostName"],
                "slurmd_port": int(fields.get("Port", "6818")),
                "partitions": fields["Partitions"].split(","),
                "available_features": (_none(fields["AvailableFeatures"]) or "").split(","),
                "active_features": [f for f in (_none(fields["ActiveFeatures"]) or "").split(",") if f],
                "total_cpus": int(fields["CPUTot"]),
                "real_memory": int(fields["RealMemory"]),
                "memory_reserved_for_system": None,
                "reason": said or None,
                "reason_user": user or None,
                "reason_time": _stamp(at[:19]),
                "boot_time": _stamp(fields["BootTime"]),
                "slurmd_start_time": _stamp(fields["SlurmdStartTime"]),
                "configured_gres": {},
            }
            vars(node).update(values)
            found[node.name] = node
        return found


sys.modules.setdefault("pyslurm", sys.modules[__name__])
