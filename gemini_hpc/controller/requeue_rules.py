"""Whom to hold and pin for a job that lost a node, when its replicas are given up: pure rules. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gemini_hpc.slurm.facts import COMPLETED, Job, Node, Reservation

# ---- whom to reserve -----------------------------------------------------------------------------------


def fits(job: Job, node: Node) -> bool:
    """Whether Slurm could put this job on the node, as far as partition, features, CPUs, memory and GRES say."""
    partitions = set(job.partition.split(",")) if job.partition else set()
    if partitions and not partitions & set(node.partitions):
        return False
    wanted = job.features.replace("&", ",").split(",") if job.features else []
    if wanted and all(w.replace("_", "").replace("-", "").isalnum() for w in wanted) and set(wanted) - node.features:
        return False
    if any(node.gres.get(name, 0) < count for name, count in job.gres_per_node.items()):
        return False
    return node.cpus >= job.min_cpus and node.memory_mb >= job.min_memory_mb


def candidates(job: Job, nodes: Mapping[str, Node], without: Iterable[str], reserved: Iterable[str]) -> list[Node]:
    """Up nodes that could replace a dead one, the idle ones first; `without` are not wanted, `reserved` are held by
    others."""
    barred = set(without) | set(reserved)
    able = [n for n in nodes.values() if n.name not in barred and n.up and fits(job, n)]
    return sorted(able, key=lambda n: (not n.idle, n.name))


# As Slurm spells them in `State=`, from 22.05 on: MAINT and MAINTENANCE, REBOOT_REQUESTED and REBOOT_ISSUED, ...
_WITHHELD = ("DRAIN", "MAINT", "REBOOT", "FAIL", "POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "INVALID_REG")


def barred(
    job: Job, node: Node, partitions: Mapping[str, str], reservations: Iterable[Reservation], ends_at: float
) -> str:
    """Why Slurm would not start this job on this node now, whoever pins it; "" if it may.

    `reservations`: those that are not the job's own; `ends_at`: when the job would end, if it began now.
    """
    if node.down:
        return f"the node is {node.state}"
    for flag in sorted(node.flags):
        if flag.startswith(_WITHHELD):
            return f"the node is {node.state}+{flag}"
    for reservation in reservations:
        if node.name in reservation.nodes and reservation.start_time < ends_at:
            return f"the node is in reservation {reservation.name}"
    asked = [p for p in job.partition.split(",") if p]
    shared = [p for p in asked if p in node.partitions]
    states = {p: partitions.get(p, "UP") for p in shared}
    if asked and not shared:
        return f"the node is not in partition {job.partition}"
    if states and "UP" not in states.values():
        return ", ".join(f"partition {name} is {state}" for name, state in states.items())
    return ""


def candidates_wanted(job: Job, nodes: Mapping[str, Node], dead: int, setting: int) -> int:
    """How many nodes to hold beside the survivors: the dead and some, or 1 % of a large partition."""
    partitions = set(job.partition.split(","))
    size = sum(1 for node in nodes.values() if partitions & set(node.partitions))
    return dead + max(setting, size // 100)


# ---- when replicas are given up ------------------------------------------------------------------------

# Not TIMEOUT: Slurm never requeues such a job, but another one may go on from it (`--gemini-after`).
_AT_ONCE = frozenset(("CANCELLED", "REVOKED", "DEADLINE"))


def release_reason(state: str | None, ended_for_s: float | None, retention_s: float, doubt_s: float = 0.0) -> str:
    """Why a job's agents may free everything now; "" while they may not. state None: Slurm does not know the job.

    `ended_for_s`: since when the job has been seen ended, None: it has not been seen so. `doubt_s`: after its end a
    loss may be found for so long that has ended the script of a job which is COMPLETED now.
    """
    if state is None and ended_for_s is None:
        return "job unknown to Slurm"
    if state in _AT_ONCE or (state == COMPLETED and (ended_for_s or 0.0) >= doubt_s):
        return f"job {state}"
    if ended_for_s is not None and ended_for_s >= retention_s:
        return f"job {state or 'gone'}, retention of {retention_s:g} s is over"
    return ""


_HELD = ("JobHeld", "Dependency", "Licenses", "Assoc", "QOS", "MaxJobs", "Partition", "Invalid")


def held(reason: str) -> bool:
    """Whether a pending job waits for something that no reserved node can give it."""
    return reason.startswith(_HELD)
