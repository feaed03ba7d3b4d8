"""What is known of jobs, nodes, partitions and reservations, whichever way Slurm was asked."""

from __future__ import annotations

from dataclasses import dataclass, field

PENDING, RUNNING, COMPLETING, CONFIGURING = "PENDING", "RUNNING", "COMPLETING", "CONFIGURING"
FAILED, COMPLETED, CANCELLED, NODE_FAIL = "FAILED", "COMPLETED", "CANCELLED", "NODE_FAIL"
# How a job ends whose script has ended of a node's loss: a script may go on after its step, and end with 0.
CUT_SHORT = frozenset((FAILED, NODE_FAIL, COMPLETED))
_STOPPED = frozenset(("SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"))
_WAITING = frozenset((PENDING, "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"))
LIVE = _STOPPED | _WAITING | {RUNNING, COMPLETING, CONFIGURING}


@dataclass(frozen=True, slots=True)
class Job:
    """One job, or one task of an array. `id` is what updates must name; `raw_id` what a node's scripts see."""

    id: str
    raw_id: int
    state: str
    reason: str
    user_id: int
    user: str
    nodes: tuple[str, ...]
    req_nodes: tuple[str, ...]
    num_nodes: int
    restarts: int
    requeue: bool
    partition: str
    reservation: str
    features: str
    array_job_id: int | None
    array_task_id: str
    het: bool
    batch: bool
    batch_host: str
    min_cpus: int
    min_memory_mb: int
    start_time: float
    end_time: float
    exit_code: str
    gres_per_node: dict[str, int]

    @property
    def actable(self) -> bool:
        """Whether updates of `id` change this one job and nothing else."""
        return not self.het and (self.array_job_id is None or self.array_task_id.isdigit())

    @property
    def over(self) -> bool:
        """Whether the job has ended, for good as far as Slurm is concerned."""
        return self.state not in LIVE


@dataclass(frozen=True, slots=True)
class Row:
    """What the watcher needs of a job; none of it is its owner's text."""

    raw_id: int
    state: str
    user_id: int
    nodes: tuple[str, ...]
    end_time: float = 0.0  # Unix time; 0.0 where Slurm sets none


@dataclass(frozen=True, slots=True)
class Node:
    """One node. Times are Unix seconds, 0.0 where Slurm does not know."""

    name: str
    state: str
    flags: frozenset[str]
    address: str
    port: int
    partitions: tuple[str, ...]
    features: frozenset[str]
    cpus: int
    memory_mb: int
    reason: str
    boot_time: float
    slurmd_start: float
    gres: dict[str, int] = field(default_factory=dict)
    hostname: str = ""
    spec_memory_mb: int = 0

    @property
    def up(self) -> bool:
        """Whether Slurm would start something here now or later."""
        bad = {"DRAIN", "NOT_RESPONDING", "FAIL", "MAINT", "POWERED_DOWN", "POWERING_DOWN", "INVALID_REG"}
        return self.state in ("IDLE", "MIXED", "ALLOCATED") and not self.flags & bad

    @property
    def idle(self) -> bool:
        """Whether nothing runs here and nothing is ending here."""
        return self.up and self.state == "IDLE" and not self.flags & {"COMPLETING", "RESERVED", "PLANNED", "REBOOT"}

    @property
    def withheld(self) -> bool:
        """Whether it is DOWN or drained. Its `reason` alone says nothing: from 24.11 on it outlives a RESUME."""
        return self.down or "DRAIN" in self.flags

    @property
    def down(self) -> bool:
        """Whether Slurm holds it for dead."""
        return self.state in ("DOWN", "ERROR")


@dataclass(frozen=True, slots=True)
class Reservation:
    """One reservation."""

    name: str
    nodes: tuple[str, ...]
    users: tuple[str, ...]
    state: str
    flags: frozenset[str]
    start_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Config:
    """What is used of `scontrol show config`. `boot_time`: when slurmctld was started, Unix seconds."""

    slurmctld_hosts: tuple[tuple[str, str], ...]
    state_save: str
    boot_time: float
    values: dict[str, str]
