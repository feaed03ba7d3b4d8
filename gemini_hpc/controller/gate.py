"""The gate before every act on Slurm: one rule decides by the site's `mode` whether an act may be done.

The controller and the epilog's hold get Slurm only through `GatedSlurm`. Callers that prepare an act for long ask the
same rule first (`Gate.explain_refusal`), and record what they leave undone (`withheld.Withheld`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemini_hpc.config import Settings
from gemini_hpc.controller.reservation import parse_raw_id
from gemini_hpc.settings import ACT, OBSERVE
from gemini_hpc.slurm import SlurmRefused
from gemini_hpc.slurm.api import SlurmApi, find_job
from gemini_hpc.slurm.facts import Job, Node, Reservation, SlurmConfig, WatchedJob


class WithheldError(SlurmRefused):
    """The error that the site's mode forbids an act. Slurm was not asked."""


class Gate:
    """The rule of the setting `mode`."""

    def __init__(self, settings: Settings) -> None:
        self.mode = settings.mode
        self._canary = frozenset(settings.canary_partitions)

    def explain_refusal(self, partitions: Iterable[str]) -> str:
        """Return why no act may touch a job or node of these partitions; "" if it may.

        Args:
            partitions: Partition of a running job, partitions that a waiting job asks for, or those of a node.
        """
        if self.mode == ACT:
            return ""
        named = sorted(p for p in partitions if p)
        if self.mode == OBSERVE:
            return 'mode = "observe"'
        if self._canary.intersection(named):
            return ""
        return f'mode = "canary", and {",".join(named) or "no partition"} is not in canary_partitions'

    def explain_job_refusal(self, job: Job | None) -> str:
        """Return why no act may touch this job; "" if it may. None is a job that Slurm no longer knows."""
        return self.explain_refusal(job.partition.split(",") if job is not None else ())


class GatedSlurm(SlurmApi):
    """Slurm behind the gate: queries pass, and each act passes or raises `WithheldError`.

    Partitions are remembered from the queries that precede an act, so that no query delays an act on a node.
    """

    def __init__(self, slurm: SlurmApi, gate: Gate) -> None:
        self._slurm, self._gate = slurm, gate
        self._of_node: dict[str, tuple[str, ...]] = {}
        self._of_job: dict[int, tuple[str, ...]] = {}

    @property
    def unreachable_at(self) -> float:  # type: ignore[override]
        """Return the monotonic time when slurmctld last failed to answer."""
        return self._slurm.unreachable_at

    # ---- the gate --------------------------------------------------------------------------------------

    @staticmethod
    def _check(act: str, why: str) -> None:
        if why:
            raise WithheldError(f"{act} is withheld: {why}")

    async def _check_node(self, act: str, name: str) -> None:
        if self._gate.mode != ACT and name not in self._of_node:
            await self.read_nodes([name])
        self._check(f"{act} of node {name}", self._gate.explain_refusal(self._of_node.get(name, ())))

    def _check_job(self, act: str, job: Job) -> None:
        self._check(f"{act} of job {job.id}", self._gate.explain_job_refusal(job))

    async def _check_reservation(self, act: str, name: str) -> None:
        """Check an act on a reservation of ours, whose name has the job's number."""
        raw_id = parse_raw_id(name)
        if self._gate.mode != ACT and raw_id and raw_id not in self._of_job:
            await find_job(self, raw_id)
        self._check(f"{act} of reservation {name}", self._gate.explain_refusal(self._of_job.get(raw_id, ())))

    # ---- queries ---------------------------------------------------------------------------------------

    async def read_job(self, raw_id: int) -> Job:
        """Return one job by its raw id."""
        job = await self._slurm.read_job(raw_id)
        self._of_job[raw_id] = tuple(job.partition.split(","))
        return job

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        """Return the nodes that the job's owner excludes."""
        return await self._slurm.read_excluded(raw_id)

    async def read_rows(self, raw_ids: Sequence[int]) -> dict[int, WatchedJob]:
        """Return state and nodes of many jobs."""
        self._of_job = {raw_id: owners for raw_id, owners in self._of_job.items() if raw_id in set(raw_ids)}
        return await self._slurm.read_rows(raw_ids)

    async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        """Return the named nodes, or all nodes if none is named."""
        nodes = await self._slurm.read_nodes(names)
        self._of_node.update({name: node.partitions for name, node in nodes.items()})
        return nodes

    async def read_partitions(self) -> dict[str, str]:
        """Return the state of each partition."""
        return await self._slurm.read_partitions()

    async def read_reservations(self) -> list[Reservation]:
        """Return all reservations."""
        return await self._slurm.read_reservations()

    async def read_owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        """Return (uid, raw job id) of each job on each of these nodes."""
        return await self._slurm.read_owners(names)

    async def read_attached(self, reservation: str) -> list[WatchedJob]:
        """Return the jobs that name a reservation."""
        return await self._slurm.read_attached(reservation)

    async def sort_by_end(self, names: Iterable[str]) -> list[str]:
        """Return these busy nodes, sorted by the end of their jobs."""
        return await self._slurm.sort_by_end(names)

    async def read_config(self) -> SlurmConfig:
        """Return slurmctld's configuration in effect."""
        return await self._slurm.read_config()

    async def has_accounting(self) -> bool:
        """Return whether the cluster keeps its users in slurmdbd."""
        return await self._slurm.has_accounting()

    async def read_admin_level(self, user: str) -> str:
        """Return slurmdbd's AdminLevel of a user."""
        return await self._slurm.read_admin_level(user)

    async def ping_slurmctlds(self) -> list[tuple[str, bool]]:
        """Return the hosts of slurmctld, and whether each answers."""
        return await self._slurm.ping_slurmctlds()

    # ---- acts ------------------------------------------------------------------------------------------

    async def set_node_down(self, name: str, reason: str) -> Node:
        """Set a node DOWN and DRAIN."""
        await self._check_node("DOWN", name)
        return await self._slurm.set_node_down(name, reason)

    async def drain_node(self, name: str, reason: str) -> None:
        """Drain a node."""
        await self._check_node("a drain", name)
        await self._slurm.drain_node(name, reason)

    async def resume_node(self, name: str) -> None:
        """Resume a node."""
        await self._check_node("a resume", name)
        await self._slurm.resume_node(name)

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        """Reserve nodes for one user."""
        await self._check_reservation("the creation", name)
        await self._slurm.create_reservation(name, nodes, user_id, minutes)

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        """Replace a reservation's nodes."""
        await self._check_reservation("a change", name)
        await self._slurm.change_reservation(name, nodes)

    async def delete_reservation(self, name: str) -> bool:
        """Delete a reservation."""
        await self._check_reservation("the deletion", name)
        return await self._slurm.delete_reservation(name)

    async def pin_job(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        """Pin a job to nodes."""
        self._check_job("a pin", job)
        return await self._slurm.pin_job(job, nodes, reservation)

    async def set_start_time(self, job: Job, start: str) -> None:
        """Set a job's earliest start."""
        self._check_job("a new start time", job)
        await self._slurm.set_start_time(job, start)

    async def nudge_scheduler(self, job: Job) -> None:
        """Send an update that changes nothing."""
        self._check_job("an update", job)
        await self._slurm.nudge_scheduler(job)

    async def detach_reservation(self, job: Job, previous: str = "") -> None:
        """Return a job to its own reservation, or to none."""
        self._check_job("another reservation", job)
        await self._slurm.detach_reservation(job, previous)

    async def hold_job(self, job: Job, why: str) -> None:
        """Hold a pending job."""
        self._check_job("a hold", job)
        await self._slurm.hold_job(job, why)

    async def note_end(self, job: Job, line: str, prefix: str) -> None:
        """Write a line into an ended job's AdminComment."""
        self._check_job("an AdminComment", job)
        await self._slurm.note_end(job, line, prefix)

    async def requeue_job(self, job: Job) -> None:
        """Requeue a job."""
        self._check_job("a requeue", job)
        await self._slurm.requeue_job(job)
