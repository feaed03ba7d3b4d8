"""Facts about jobs, nodes, partitions and reservations, independent of the API that Slurm was asked by."""

from __future__ import annotations

from dataclasses import dataclass, field

PENDING, RUNNING, COMPLETING, CONFIGURING = "PENDING", "RUNNING", "COMPLETING", "CONFIGURING"
FAILED, COMPLETED, CANCELLED, NODE_FAIL = "FAILED", "COMPLETED", "CANCELLED", "NODE_FAIL"
# End states of a job that lost a node: the script may go on after its failed step, and even end with 0.
CUT_SHORT = frozenset((FAILED, NODE_FAIL, COMPLETED))
_STOPPED = frozenset(("SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"))
_WAITING = frozenset((PENDING, "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"))
LIVE = _STOPPED | _WAITING | {RUNNING, COMPLETING, CONFIGURING}
# Slurm sets a silent node DOWN after this time, unless slurm.conf has another SlurmdTimeout.
SLURMD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job, or one task of an array.

    Updates must name `id`. Scripts on the node see `raw_id`.
    """

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
    may_requeue: bool
    partition: str
    reservation: str
    features: str
    array_job_id: int | None
    array_task_id: str
    is_het: bool
    is_batch: bool
    min_cpus: int
    min_memory_mb: int
    start_time: float
    end_time: float
    exit_code: str
    gres_per_node: dict[str, int]

    @property
    def is_actable(self) -> bool:
        """Return whether updates of `id` change only this one job."""
        return not self.is_het and (self.array_job_id is None or self.array_task_id.isdigit())

    @property
    def has_ended(self) -> bool:
        """Return whether the job has ended permanently in Slurm's view."""
        return self.state not in LIVE


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """The facts on a job that the watcher needs, none of which is text of the job's owner."""

    raw_id: int
    state: str
    user_id: int
    nodes: tuple[str, ...]
    end_time: float = 0.0  # Unix time; 0.0 if Slurm sets none


@dataclass(frozen=True, slots=True)
class Node:
    """The facts on a node. Times are Unix times in seconds, 0.0 if Slurm does not know them."""

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
    def state_words(self) -> str:
        """Return the state with its flags, for people."""
        return "+".join((self.state, *sorted(self.flags)))

    @property
    def is_up(self) -> bool:
        """Return whether Slurm would start a job here now or later."""
        bad = {"DRAIN", "NOT_RESPONDING", "FAIL", "MAINT", "POWERED_DOWN", "POWERING_DOWN", "INVALID_REG"}
        return self.state in ("IDLE", "MIXED", "ALLOCATED") and not self.flags & bad

    @property
    def is_idle(self) -> bool:
        """Return whether no job runs or ends here."""
        return (
            self.is_up and self.state == "IDLE" and not self.flags & {"COMPLETING", "RESERVED", "PLANNED", "REBOOT"}
        )

    @property
    def is_withheld(self) -> bool:
        """Return whether the node is DOWN or drained.

        A `reason` alone proves neither: from Slurm 24.11 on it stays set after a RESUME.
        """
        return self.is_down or "DRAIN" in self.flags

    @property
    def is_down(self) -> bool:
        """Return whether Slurm considers the node dead."""
        return self.state in ("DOWN", "ERROR")


@dataclass(frozen=True, slots=True)
class Reservation:
    """The facts on a reservation."""

    name: str
    nodes: tuple[str, ...]
    users: tuple[str, ...]
    state: str
    flags: frozenset[str]
    start_time: float = 0.0


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """The parts of `scontrol show config` in use.

    `boot_time` is the Unix time, in seconds, when slurmctld was started.
    """

    slurmctld_hosts: tuple[tuple[str, str], ...]
    state_save: str
    boot_time: float
    values: dict[str, str]
