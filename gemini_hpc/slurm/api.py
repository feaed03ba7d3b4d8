"""The controller's interface to Slurm, implemented by the one client and by its test doubles.

Each method is documented in its implementation (`slurm.Slurm`). All methods raise `SlurmRefused` if Slurm
refuses, and `SlurmUnreachable` if Slurm does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gemini_hpc.slurm.errors import UnknownJob
from gemini_hpc.slurm.facts import Job, Node, Reservation, SlurmConfig, WatchedJob


class SlurmReading(Protocol):
    """The queries, which change nothing in Slurm."""

    # monotonic time when slurmctld last failed to answer
    unreachable_at: float

    async def read_job(self, raw_id: int) -> Job:
        """Return one job by its raw id."""

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        """Return the nodes that the job's owner excludes."""

    async def read_rows(self, raw_ids: Sequence[int]) -> dict[int, WatchedJob]:
        """Return state and nodes of many jobs."""

    async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        """Return the named nodes, or all nodes if none is named."""

    async def read_partitions(self) -> dict[str, str]:
        """Return the state of each partition."""

    async def read_reservations(self) -> list[Reservation]:
        """Return all reservations."""

    async def read_owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        """Return (uid, raw job id) of each job that is running or ending on each of these nodes."""

    async def read_attached(self, reservation: str) -> list[WatchedJob]:
        """Return the jobs, running or waiting, that name a reservation."""

    async def sort_by_end(self, names: Iterable[str]) -> list[str]:
        """Return these busy nodes, sorted by the end of their jobs, earliest first."""

    async def read_config(self) -> SlurmConfig:
        """Return slurmctld's configuration in effect."""

    async def has_accounting(self) -> bool:
        """Return whether the cluster keeps its users in slurmdbd."""

    async def read_admin_level(self, user: str) -> str:
        """Return slurmdbd's AdminLevel of a user, "" if slurmdbd does not know the user."""

    async def ping_slurmctlds(self) -> list[tuple[str, bool]]:
        """Return the hosts of slurmctld, the primary first, and whether each answers."""


class SlurmApi(SlurmReading, Protocol):
    """All operations: the queries, and those that change a node, a reservation or a job."""

    async def set_node_down(self, name: str, reason: str) -> Node:
        """Set a node DOWN and DRAIN."""

    async def drain_node(self, name: str, reason: str) -> None:
        """Drain a node: no new job begins there, and running jobs continue."""

    async def resume_node(self, name: str) -> None:
        """Resume a node that was drained in error."""

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        """Reserve nodes for one user, regardless of the jobs that run there."""

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        """Replace a reservation's nodes in one step, so that no node is free in between."""

    async def delete_reservation(self, name: str) -> bool:
        """Delete a reservation; return False if a job still names it."""

    async def pin_job(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        """Make a job start next on these nodes (and more), out of this reservation."""

    async def set_start_time(self, job: Job, start: str) -> None:
        """Set a job's earliest start, such as `now+2`."""

    async def nudge_scheduler(self, job: Job) -> None:
        """Send an update that changes nothing, because the scheduler runs after each update."""

    async def detach_reservation(self, job: Job, previous: str = "") -> None:
        """Return a job to its own reservation, or to none."""

    async def hold_job(self, job: Job, why: str) -> None:
        """Hold a pending job until its owner releases it; `why` is recorded."""

    async def note_end(self, job: Job, line: str, prefix: str) -> None:
        """Write a line into an ended job's AdminComment in slurmdbd, unless another program has written there."""

    async def requeue_job(self, job: Job) -> None:
        """Requeue a running or ended job."""


async def find_job(slurm: SlurmReading, raw_id: int) -> Job | None:
    """Return one job by its raw id; None if Slurm does not know it."""
    try:
        return await slurm.read_job(raw_id)
    except UnknownJob:
        return None
