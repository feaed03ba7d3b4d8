"""What the controller asks of Slurm: the interface of the one client, and of every double of it in tests.

Each method is documented where it is made (`slurm.Slurm`). All raise `SlurmError` where Slurm says no and
`SlurmUnreachable` where it gives no answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gemini_hpc.slurm.facts import Config, Job, Node, Reservation, Row


class SlurmApi(Protocol):
    """Slurm, as an operator sees and changes it."""

    # When slurmctld last failed to answer (monotonic).
    unreachable_at: float

    # ---- reading ---------------------------------------------------------------------------------------

    async def job(self, raw_id: int) -> Job:
        """One job by its raw id."""
        ...

    async def excluded(self, raw_id: int) -> tuple[str, ...]:
        """The nodes that the job's owner does not want."""
        ...

    async def raw_id(self, task: str) -> int:
        """The raw id of an array task written as `10_3`."""
        ...

    async def rows(self, raw_ids: Sequence[int]) -> dict[int, Row]:
        """State and nodes of many jobs."""
        ...

    async def nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        """These nodes, or all."""
        ...

    async def partitions(self) -> dict[str, str]:
        """The state of each partition."""
        ...

    async def reservations(self) -> list[Reservation]:
        """All reservations."""
        ...

    async def owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        """(uid, raw job id) of everything that runs or ends on each of these nodes."""
        ...

    async def attached(self, reservation: str) -> list[Row]:
        """The jobs, running or waiting, that name a reservation."""
        ...

    async def free_soonest(self, names: Iterable[str]) -> list[str]:
        """These busy nodes, those whose jobs end first in front."""
        ...

    async def config(self) -> Config:
        """slurmctld's configuration in force."""
        ...

    async def accounting(self) -> bool:
        """Whether the cluster keeps its users in slurmdbd."""
        ...

    async def admin_level(self, user: str) -> str:
        """slurmdbd's AdminLevel of a user; "" where it knows no such user."""
        ...

    async def slurmctlds(self) -> list[tuple[str, bool]]:
        """The hosts of slurmctld, the primary first, and whether each answers."""
        ...

    # ---- changing --------------------------------------------------------------------------------------

    async def node_down(self, name: str, reason: str) -> Node:
        """DOWN and drained."""
        ...

    async def node_drain(self, name: str, reason: str) -> None:
        """Let no job begin there; what runs there goes on."""
        ...

    async def node_resume(self, name: str) -> None:
        """Give a node back that was drained in error."""
        ...

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        """Hold nodes for one user, past the jobs that run there."""
        ...

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        """Hold these nodes from now on, in one step: none of them is free in between."""
        ...

    async def delete_reservation(self, name: str) -> bool:
        """False where a job still names it."""
        ...

    async def pin(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        """Next start on these nodes (and more), out of this reservation."""
        ...

    async def set_start_time(self, job: Job, start: str) -> None:
        """Earliest start, such as `now+2`."""
        ...

    async def nudge(self, job: Job) -> None:
        """An update that changes nothing: the scheduler runs after each."""
        ...

    async def detach_reservation(self, job: Job, previous: str = "") -> None:
        """Back to the job's own reservation, or none."""
        ...

    async def hold(self, job: Job, why: str) -> None:
        """Keep a pending job from starting until its owner releases it; why: for its record."""
        ...

    async def requeue(self, job: Job) -> None:
        """Send a running or ended job back to pending."""
        ...
