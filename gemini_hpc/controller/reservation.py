"""The reservation of one recovery: survivors, and some nodes that could replace the dead.

The reservation exists before the job leaves COMPLETING. Otherwise the next job of a busy cluster takes the
survivors within 0.3 s. It is deleted as soon as the job runs. No node of another owner's protected job is ever in
it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gemini_hpc import clock
from gemini_hpc.controller.requeue_rules import find_candidates
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.slurm import SlurmRefused, SlurmUnreachable
from gemini_hpc.slurm.api import SlurmApi, find_job
from gemini_hpc.slurm.facts import RUNNING, Job, Node, Reservation

PREFIX = "gemini_"  # prefix of the names of our reservations
RESERVED_MINUTES = 10
HOLD_S = 60  # a survivor's epilog steers a job for at most this long
Say = Callable[[str, str, str], None]
Note = Callable[..., None]


@dataclass
class Held:
    """The nodes that are reserved for one requeue.

    `log_event(event, host, detail)` writes to the event log, `write_journal(step, phase, **data)` to the journal.

    Attributes:
        list_protected: Return the nodes of other owners' protected jobs now.
        find_survivors: Return the survivors for whom another reservation of ours was made; None if they are not
            known.
        count_visits: Return how often a node did harm lately.
        reserving: Lock under which only one recovery at a time chooses nodes.
    """

    slurm: SlurmApi
    raw_id: int
    user_id: int
    log_event: Say
    write_journal: Note
    minutes: int = RESERVED_MINUTES
    list_protected: Callable[[], Collection[str]] = frozenset
    find_survivors: Callable[[str], Collection[str] | None] = lambda name: None
    count_visits: Callable[[str], int] = lambda node: 0
    reserving: asyncio.Lock = field(default_factory=asyncio.Lock)
    name: str = ""
    is_own: bool = False  # the reservation is the job's own, and is neither changed nor deleted
    wanted: int = 0
    _said: set[str] = field(default_factory=set)
    _doubtful: str = ""  # a reservation that may exist: Slurm has not answered

    async def reserve_nodes(
        self,
        job: Job,
        nodes: Mapping[str, Node],
        keep: Sequence[str],
        without: Collection[str],
        *,
        is_alone: bool = True,
    ) -> None:
        """Hold the survivors in `keep` and at most `wanted` candidates besides, none of `without`.

        If Slurm refuses, nothing is held, and the refusal is logged.

        Args:
            job: The job.
            nodes: All nodes by name.
            keep: Survivors to hold.
            without: The job's other nodes. They must not be held, and have to be replaced.
            is_alone: Whether any other reservation for this job is a leftover to be deleted first. False in an
                epilog, where another survivor may do the same work.
        """
        if job.reservation and not job.reservation.startswith(PREFIX):
            self.name, self.is_own = job.reservation, True
            self.log_event("reserved", "", f"the job's own reservation {job.reservation} is kept")
            return
        async with self.reserving:
            others = await self.slurm.read_reservations()
            if is_alone:
                for left in [r.name for r in others if self.is_mine(r.name)]:
                    await self.drop_reservation(left)
                others = [r for r in others if not self.is_mine(r.name)]
            await self._withdraw_survivors(keep, others)
            others = [r for r in await self.slurm.read_reservations() if not (is_alone and self.is_mine(r.name))]
            taken = {n for r in others for n in r.nodes}
            held_now = [n for n in keep if n not in taken]
            spare = await self._choose_candidates(job, nodes, {*keep, *without, *taken}, len(without), self.wanted)
            await self._create(held_now, spare)

    async def _create(self, held_now: list[str], spare: list[str]) -> None:
        name = f"{PREFIX}{self.raw_id}_{secrets.token_hex(6)}"
        for chosen in ([*held_now, *spare], held_now):
            if not chosen:
                continue
            self.write_journal("reserve", "before", name=name, nodes=chosen)
            began = clock.monotonic()
            try:
                await self.slurm.create_reservation(name, chosen, self.user_id, self.minutes)
            except SlurmUnreachable:
                self._doubtful = name
                raise
            except SlurmRefused as exc:
                self.write_journal("reserve", "failed", name=name, error=str(exc))
                self.log_event("reserve_refused", "", f"{','.join(chosen)}: {exc}")
                continue
            self.name = name
            self.write_journal("reserve", "after", name=name)
            self.log_event("reserved", "", f"{','.join(chosen)} as {name} {describe_ms(began)}")
            return

    async def _choose_candidates(
        self, job: Job, nodes: Mapping[str, Node], without: Collection[str], missing: int, most: int
    ) -> list[str]:
        """Return up nodes that could replace the missing ones: idle ones, then those that become free soonest.

        Busy nodes are used only if there are too few idle ones. Nodes that did harm lately come last.
        """
        unwanted = await self.slurm.read_excluded(self.raw_id)
        able = find_candidates(job, nodes, [*without, *unwanted], self.list_protected())
        idle = sorted((n.name for n in able if n.is_idle), key=self.count_visits)
        busy = [n.name for n in able if not n.is_idle]
        if len(idle) >= missing or not busy:
            return idle[:most]
        return (idle + sorted(await self.slurm.sort_by_end(busy), key=self.count_visits))[:most]

    async def _withdraw_survivors(self, keep: Iterable[str], others: Iterable[Reservation]) -> None:
        """Take survivors of this job out of other recoveries' reservations, where they are only candidates."""
        for other in others:
            theirs = self.find_survivors(other.name) if other.name.startswith(PREFIX) else None
            if theirs is None or not (own_survivors := set(keep) & set(other.nodes) - set(theirs)):
                continue
            rest = [n for n in other.nodes if n not in own_survivors]
            if not rest:
                continue
            self.write_journal("take", "before", name=other.name, nodes=sorted(own_survivors))
            try:
                await self.slurm.change_reservation(other.name, rest)
            except SlurmRefused as exc:
                self.log_event(
                    "reserve_refused", "", f"{','.join(sorted(own_survivors))} stay in {other.name}: {exc}"
                )
                continue
            self.write_journal("take", "after", name=other.name)
            self.log_event(
                "taken_back",
                "",
                f"{','.join(sorted(own_survivors))} taken out of {other.name}: survivors of this job",
            )

    async def adapt_nodes(
        self, job: Job, nodes: Mapping[str, Node], keep: Sequence[str], without: Collection[str]
    ) -> None:
        """Take the nodes in `without` out of the reservation, and take survivors that are back into it.

        If the held candidates do not suffice, nodes are added that are free now, or will be.
        """
        if not self.name or self.is_own:
            return
        async with self.reserving:
            reservations = await self.slurm.read_reservations()
            reservation = next((r for r in reservations if r.name == self.name), None)
            if reservation is None:
                return
            rest = [n for n in reservation.nodes if n not in without]
            spare = [n for n in rest if n not in keep and n in nodes and nodes[n].is_up]
            idle = sum(nodes[n].is_idle or "RESERVED" in nodes[n].flags for n in spare)
            taken = {n for r in reservations for n in r.nodes}
            more = [n for n in keep if n not in taken]
            if (missing := len(without) - idle) > 0:
                most = max(self.wanted - len(spare), missing)
                found = await self._choose_candidates(job, nodes, {*keep, *without, *taken}, missing, most)
                full = len(spare) >= self.wanted
                more += [n for n in found if nodes[n].is_idle or not full]
            for chosen in ([*rest, *more], rest):
                if chosen and chosen != list(reservation.nodes) and await self._change(chosen, reservation.nodes):
                    return

    async def _change(self, chosen: list[str], before: Collection[str]) -> bool:
        self.write_journal("reserve", "before", name=self.name, nodes=chosen)
        try:
            await self.slurm.change_reservation(self.name, chosen)
        except SlurmRefused as exc:
            self.log_once("widen_refused", "", f"{','.join(chosen)}: {exc}")
            return False
        self.write_journal("reserve", "after", name=self.name)
        if gone := [n for n in before if n not in chosen]:
            self.log_event("narrowed", "", f"{','.join(gone)} taken out: the job must not start there")
        if more := [n for n in chosen if n not in before]:
            self.log_event("widened", "", f"added {','.join(more)}")
        return True

    def is_mine(self, name: str) -> bool:
        """Return whether a reservation is, or was, for this job."""
        return name.startswith(f"{PREFIX}{self.raw_id}_")

    async def drop_reservation(self, name: str) -> None:
        """Detach this job from a reservation of ours and delete the reservation."""
        try:
            job = await self.slurm.read_job(self.raw_id)
            if job.reservation == name:
                self.write_journal("detach", "before", name=name)
                await self.slurm.detach_reservation(job)
        except SlurmRefused as exc:
            self.write_journal("detach", "failed", error=str(exc))
        self.write_journal("delete", "before", name=name)
        for pause_s in (0.05, 0.1, 0.2, 0.5, 1.0, 0.0):
            if await self.slurm.delete_reservation(name):
                self.write_journal("delete", "after", name=name)
                return
            await self._evict(name)
            await asyncio.sleep(pause_s)
        self.log_event("reservation_left", "", f"{name} is still in use; the reservation ends by itself")

    async def evict_jobs(self) -> None:
        """Detach other jobs of the same owner that use our reservation.

        Such a job would take a survivor and prevent the deletion of the reservation.
        """
        if self.name and not self.is_own:
            await self._evict(self.name)

    async def _evict(self, name: str) -> None:
        for row in await self.slurm.read_attached(name):
            if row.raw_id == self.raw_id:
                continue
            try:
                job = await self.slurm.read_job(row.raw_id)
                if job.reservation == name and job.is_actable:
                    self.write_journal("evict", "before", name=name, job=row.raw_id)
                    await self.slurm.detach_reservation(job)
                    self.log_event("foreign_detached", "", f"job {job.id} had put itself into {name}")
            except SlurmRefused as exc:
                self.log_once("foreign_left", "", f"job {row.raw_id} is in {name}: {exc}")

    async def release_reservation(self) -> None:
        """Release the reservation."""
        if self.name and not self.is_own:
            began = clock.monotonic()
            name, self.name = self.name, ""
            await self.drop_reservation(name)
            self.log_event("released", "", f"reservation {name} {describe_ms(began)}")
        if self._doubtful:
            name, self._doubtful = self._doubtful, ""
            await self.drop_reservation(name)

    def log_once(self, event: str, host: str, detail: str) -> None:
        """Log the event the first time only."""
        if event not in self._said:
            self._said.add(event)
            self.log_event(event, host, detail)


def describe_ms(began: float) -> str:
    """Return the time since `began` (monotonic) as text for an event's detail."""
    return f"[{(clock.monotonic() - began) * 1000:.0f} ms]"


def parse_raw_id(name: str) -> int:
    """Return the raw id of the job for which a reservation of ours was made, or 0 for another reservation's name."""
    return parse_number(name.removeprefix(PREFIX).split("_")[0]) if name.startswith(PREFIX) else 0


async def delete_leftovers(slurm: SlurmApi, kept: Sequence[str], may: Callable[[Job | None], bool]) -> list[str]:
    """Delete reservations of ours that are of no more use after a takeover. Return their names.

    Args:
        slurm: Slurm.
        kept: Reservations that are still of use.
        may: Returns whether acts on this job are allowed; None is a job that Slurm does not know.
    """
    dropped = []
    for reservation in await slurm.read_reservations():
        raw_id = parse_raw_id(reservation.name)
        if not raw_id or reservation.name in kept:
            continue
        job = await find_job(slurm, raw_id)
        if may(job) and (job is None or job.state == RUNNING or job.has_ended):
            if job is not None and job.reservation == reservation.name and not job.has_ended:
                await slurm.detach_reservation(job)
            await slurm.delete_reservation(reservation.name)
            dropped.append(reservation.name)
    return dropped
