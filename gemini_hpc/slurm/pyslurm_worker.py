"""A separate program that answers requests on its standard input with pyslurm, one line of JSON each.

Only `pyslurm_reader` starts the program, as a file, so that this process loads no other part of gemini-hpc.
The import of pyslurm may end a process, and its calls hold the interpreter until slurmctld answers. The
caller has a time-out and kills this process. The output of Slurm's library does not mix with the answers.

    {"id": 1, "call": "job", "args": [41]}
    {"id": 1, "value": {...}}   or   {"id": 1, "error": "Invalid job id specified", "kind": "refused"}

`kind` is "refused" (by Slurm), "unreadable" (a text that is not UTF-8) or "surprise" (anything else).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

JOB = (
    "id",
    "array_id",
    "array_task_id",
    "array_tasks_waiting",
    "heterogeneous_id",
    "state",
    "state_reason",
    "user_id",
    "user_name",
    "allocated_nodes",
    "required_nodes",
    "excluded_nodes",
    "num_nodes",
    "requeue_count",
    "is_requeueable",
    "is_batch_job",
    "partition",
    "reservation",
    "constraints",
    "min_cpus_per_node",
    "memory_per_node",
    "memory_per_cpu",
    "start_time",
    "end_time",
    "exit_code",
    "exit_code_signal",
    "gres_per_node",
)
# absent in some releases
JOB_MAY = ("tres_per_job", "tres_per_socket", "tres_per_task")
NODE = (
    "name",
    "state",
    "address",
    "hostname",
    "slurmd_port",
    "partitions",
    "available_features",
    "active_features",
    "total_cpus",
    "real_memory",
    "memory_reserved_for_system",
    "reason",
    "reason_user",
    "reason_time",
    "boot_time",
    "slurmd_start_time",
    "configured_gres",
)


def list_calls(pyslurm: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions that may be called, by name."""

    def read_job(raw_id: int) -> dict[str, Any]:
        found = pyslurm.Job.load(raw_id)
        value = {name: getattr(found, name) for name in JOB}
        return value | {name: str(getattr(found, name, None) or "") for name in JOB_MAY}

    def read_nodes(names: list[str]) -> list[dict[str, Any]]:
        found = [pyslurm.Node.load(name) for name in names] if names else list(pyslurm.Nodes.load().values())
        return [{name: getattr(node, name) for name in NODE} for node in found]

    def set_node_state(name: str, state: str, reason: str) -> None:
        change = pyslurm.Node(state=state, reason=reason) if reason else pyslurm.Node(state=state)
        pyslurm.Node(name).modify(change)

    def requeue(raw_id: int) -> None:
        pyslurm.Job(raw_id).requeue()

    return {
        "job": read_job,
        "nodes": read_nodes,
        "node_state": set_node_state,
        "requeue": requeue,
    }


def answer_line(pyslurm: Any, known: dict[str, Callable[..., Any]], line: str) -> dict[str, Any]:
    """Return the answer to one line."""
    asked = json.loads(line)
    try:
        return {"id": asked["id"], "value": known[asked["call"]](*asked["args"])}
    except pyslurm.RPCError as exc:
        return {"id": asked["id"], "error": str(exc), "kind": "refused"}
    except UnicodeDecodeError as exc:
        return {"id": asked["id"], "error": str(exc), "kind": "unreadable"}
    except Exception as exc:  # whatever it is, this process is not used again
        return {"id": asked["id"], "error": f"{type(exc).__name__}: {exc}", "kind": "surprise"}


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the library's own output
    import pyslurm  # type: ignore[import-not-found]  # in no other process than this one

    known = list_calls(pyslurm)
    for line in sys.stdin:
        answers.write(json.dumps(answer_line(pyslurm, known, line), default=str) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
