"""The rules for a job that lost a node: nodes to hold and pin, and when replicas are given up. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gemini_hpc.slurm.facts import COMPLETED, Job, Node, Reservation

# ---- nodes to reserve ----------------------------------------------------------------------------------


def fits_job(job: Job, node: Node) -> bool:
    """Return whether Slurm could run this job on the node, by partition, features, CPUs, memory and GRES."""
    partitions = set(job.partition.split(",")) if job.partition else set()
    if partitions and not partitions & set(node.partitions):
        return False
    wanted = job.features.replace("&", ",").split(",") if job.features else []
    if wanted and all(w.replace("_", "").replace("-", "").isalnum() for w in wanted) and set(wanted) - node.features:
        return False
    if any(node.gres.get(name, 0) < count for name, count in job.gres_per_node.items()):
        return False
    return node.cpus >= job.min_cpus and node.memory_mb >= job.min_memory_mb


def find_candidates(
    job: Job, nodes: Mapping[str, Node], without: Iterable[str], reserved: Iterable[str]
) -> list[Node]:
    """Return the up nodes that could replace a dead one, idle ones first.

    Nodes in `without` are not wanted; nodes in `reserved` are held by others.
    """
    barred = set(without) | set(reserved)
    able = [n for n in nodes.values() if n.name not in barred and n.is_up and fits_job(job, n)]
    return sorted(able, key=lambda n: (not n.is_idle, n.name))


# Slurm's spellings in `State=`, from 22.05 on: MAINT and MAINTENANCE, REBOOT_REQUESTED and REBOOT_ISSUED, ...
_WITHHELD = ("DRAIN", "MAINT", "REBOOT", "FAIL", "POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "INVALID_REG")


def explain_bar(
    job: Job, node: Node, partitions: Mapping[str, str], reservations: Iterable[Reservation], ends_at: float
) -> str:
    """Return why Slurm would not start this job on this node now, even with a pin; "" if it may.

    Args:
        job: The job.
        node: The node.
        partitions: State of each partition by name.
        reservations: Reservations that are not the job's own.
        ends_at: Unix time at which the job would end if it began now.
    """
    if node.is_down:
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


def count_candidates(job: Job, nodes: Mapping[str, Node], dead: int, setting: int) -> int:
    """Return how many nodes to hold beside the survivors: the dead and some more, or 1 % of a large partition."""
    partitions = set(job.partition.split(","))
    size = sum(1 for node in nodes.values() if partitions & set(node.partitions))
    return dead + max(setting, size // 100)


# ---- when replicas are given up ------------------------------------------------------------------------

# Not TIMEOUT: Slurm never requeues such a job, but another job may continue its training (`--gemini-after`).
_AT_ONCE = frozenset(("CANCELLED", "REVOKED", "DEADLINE"))


def find_release_reason(
    state: str | None, ended_for_s: float | None, retention_s: float, doubt_s: float = 0.0
) -> str:
    """Return why a job's agents may free everything now; "" while they may not.

    Args:
        state: The job's state; None if Slurm does not know the job.
        ended_for_s: Seconds since the job was seen ended; None if it was not.
        retention_s: Seconds for which copies are kept after the job's end.
        doubt_s: Seconds after the end of a COMPLETED job in which a loss may still be found that ended its script.
    """
    if state is None and ended_for_s is None:
        return "job unknown to Slurm"
    if state in _AT_ONCE or (state == COMPLETED and (ended_for_s or 0.0) >= doubt_s):
        return f"job {state}"
    if ended_for_s is not None and ended_for_s >= retention_s:
        return f"job {state or 'gone'}, retention of {retention_s:g} s is over"
    return ""


_HELD = ("JobHeld", "Dependency", "Licenses", "Assoc", "QOS", "MaxJobs", "Partition", "Invalid")


def is_held(reason: str) -> bool:
    """Return whether a pending job waits for something that no reserved node can provide."""
    return reason.startswith(_HELD)
