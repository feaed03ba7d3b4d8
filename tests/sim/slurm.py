"""Slurm's commands on one host: the interface of the production client, answered by `slurmctld` in memory.

A command takes a moment to begin, reaches the slurmctld in charge if the network lets it, is done there at one moment
and answered a moment later, when that may be true no more. It goes on when its caller has died; an answer that is
lost leaves its caller in doubt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from gemini_hpc import clock
from gemini_hpc.slurm.api import SlurmApi
from gemini_hpc.slurm.errors import SlurmError, SlurmRefused, SlurmUnreachable
from gemini_hpc.slurm.facts import (
    CANCELLED,
    COMPLETED,
    FAILED,
    NODE_FAIL,
    PENDING,
    Job,
    Node,
    Reservation,
    SlurmConfig,
    WatchedJob,
)

from .kernel import Process
from .network import Host
from .slurmctld import ACTIVE, Held, JobRecord, Slurmctld

T = TypeVar("T")
TIMEOUT_S, TCP_TIMEOUT_S = 10.0, 2.0


class SimSlurm(SlurmApi):
    """As `process`, which runs the commands, sees Slurm."""

    def __init__(self, ctld: Slurmctld, process: Process, state_save: str) -> None:
        self._ctld, self._process, self._state_save = ctld, process, state_save
        self._rng, self._network = ctld.rng, ctld.world.network
        self.unreachable_at = -math.inf

    # ---- one command -----------------------------------------------------------------------------------

    async def _ask(self, what: Callable[[], T]) -> T:
        """Have `what` done in slurmctld. Raises what that raises, and `SlurmUnreachable`."""
        await asyncio.sleep(self._rng.uniform(0.002, 0.015))
        loop = self._ctld.world.loop
        answer: asyncio.Future[T] = loop.create_future()
        me = self._network.hosts[self._process.host]
        self._try(me, list(self._ctld.hosts), what, answer)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError:
            self.unreachable_at = clock.monotonic()
            raise SlurmUnreachable(f"no answer within {TIMEOUT_S:g} s") from None
        except SlurmUnreachable:
            self.unreachable_at = clock.monotonic()
            raise

    def _try(self, me: Host, hosts: list[Host], what: Callable[[], T], answer: asyncio.Future[T]) -> None:
        network, now = self._network, self._ctld.world.loop.now
        if not hosts:
            self._fail(answer, SlurmUnreachable("Unable to contact slurm controller (connect failure)"))
            return
        host, *more = hosts

        def arrive() -> None:
            at = self._ctld.world.loop.now
            if not network.hears(me, host):
                network.at(at + TCP_TIMEOUT_S, self._try, me, more, what, answer)
            elif self._ctld.charge is not host:
                wait_s = self._rng.uniform(0.05, 1.0)
                network.at(at + wait_s, self._try, me, more, what, answer)
            else:
                self._do(me, host, what, answer)

        network.at(now + (0.0002 if host is me else self._rng.uniform(0.0005, 0.01)), arrive)

    def _do(self, me: Host, host: Host, what: Callable[[], T], answer: asyncio.Future[T]) -> None:
        try:
            result, error = what(), None
        except SlurmError as exc:
            result, error = None, exc
        took_s = (
            self._rng.uniform(0.3, 2.0) if self._rng.random() < self._ctld.slow else self._rng.uniform(0.005, 0.04)
        )

        def back() -> None:
            if not self._network.hears(host, me) or self._ctld.charge is not host:
                return  # nobody will ever answer
            if error is not None:
                self._fail(answer, error)
            elif not answer.done():
                answer.set_result(result)  # type: ignore[arg-type]

        self._network.at(self._ctld.world.loop.now + took_s, back)

    @staticmethod
    def _fail(answer: asyncio.Future[T], error: SlurmError) -> None:
        if not answer.done():
            answer.set_exception(error)

    # ---- reading ---------------------------------------------------------------------------------------

    async def read_job(self, raw_id: int) -> Job:
        return await self._ask(lambda: self._ctld.job_facts(raw_id))

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        return await self._ask(lambda: (self._ctld.find(raw_id), ())[1])

    def _row(self, job: JobRecord) -> WatchedJob:
        facts = self._ctld.job_facts(job.raw_id)
        return WatchedJob(facts.raw_id, facts.state, facts.user_id, facts.nodes, facts.end_time)

    def _jobs(self) -> list[JobRecord]:
        found = []
        for job in self._ctld.state.jobs.values():
            try:
                found.append(self._ctld.find(job.raw_id))
            except SlurmError:
                continue
        return found

    async def read_rows(self, raw_ids: Sequence[int]) -> dict[int, WatchedJob]:
        wanted = set(raw_ids)
        return await self._ask(lambda: {j.raw_id: self._row(j) for j in self._jobs() if j.raw_id in wanted})

    async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        wanted = list(names)

        def read() -> dict[str, Node]:
            found = self._ctld.known(wanted) or list(self._ctld.state.nodes)
            return {name: self._ctld.node_facts(name) for name in found}

        return await self._ask(read)

    async def read_partitions(self) -> dict[str, str]:
        return await self._ask(lambda: {"all": "UP"})

    async def read_reservations(self) -> list[Reservation]:
        return await self._ask(self._ctld.reservation_facts)

    async def read_owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        wanted = list(names)

        def read() -> dict[str, set[tuple[int, int]]]:
            found = self._ctld.known(wanted)
            return {name: {(j.user_id, j.raw_id) for j in self._ctld.used_by(name)} for name in found}

        return await self._ask(read)

    async def read_attached(self, reservation: str) -> list[WatchedJob]:
        return await self._ask(lambda: [self._row(j) for j in self._jobs() if j.reservation == reservation])

    async def sort_by_end(self, names: Iterable[str]) -> list[str]:
        wanted = list(names)

        def read() -> list[str]:
            ends = {n: max((j.start + j.runs_s for j in self._ctld.used_by(n)), default=0.0) for n in wanted}
            return sorted(self._ctld.known(wanted), key=lambda name: (ends[name], name))

        return await self._ask(read)

    async def read_config(self) -> SlurmConfig:
        return await self._ask(lambda: self._ctld.config_facts(self._state_save))

    async def has_accounting(self) -> bool:
        return await self._ask(lambda: False)

    async def read_admin_level(self, user: str) -> str:
        return ""

    async def ping_slurmctlds(self) -> list[tuple[str, bool]]:
        await asyncio.sleep(self._rng.uniform(0.01, 0.05))
        me, network = self._network.hosts[self._process.host], self._network
        found = []
        for host in self._ctld.hosts:
            heard = network.hears(me, host) and network.hears(host, me)
            if not heard:
                await asyncio.sleep(TCP_TIMEOUT_S)
            found.append((host.name, heard and self._ctld.running[host.name]))
        return found

    # ---- changing --------------------------------------------------------------------------------------

    async def _change(self, what: str, name: str, change: Callable[[], None]) -> None:
        def do() -> None:
            change()
            self._ctld.changed_by_us(what, name)
            self._ctld.changed()

        await self._ask(do)

    async def set_node_down(self, name: str, reason: str) -> Node:
        def drain() -> None:
            node = self._ctld.state.nodes[self._ctld.known([name])[0]]
            node.drain, node.reason = True, reason

        await self._change("drain", name, drain)
        await self._change("down", name, lambda: self._ctld.set_down(name))
        node = (await self.read_nodes([name]))[name]
        if not node.is_down:
            raise SlurmRefused(f"node {name} was set DOWN, but is {node.state}")
        return node

    async def drain_node(self, name: str, reason: str) -> None:
        def drain() -> None:
            node = self._ctld.state.nodes[self._ctld.known([name])[0]]
            node.drain, node.reason = True, reason

        await self._change("drain", name, drain)

    async def resume_node(self, name: str) -> None:
        def resume() -> None:
            node = self._ctld.state.nodes[self._ctld.known([name])[0]]
            node.drain = node.down = False
            node.heard = self._ctld.now

        await self._change("resume", name, resume)

    def _overlap(self, name: str, nodes: Sequence[str]) -> None:
        self._ctld.known(nodes)
        others = [r for r in self._ctld.state.reservations.values() if r.name != name and set(r.nodes) & set(nodes)]
        if not nodes or others:
            raise SlurmRefused("Requested nodes are busy: the reservation overlaps another one")

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        def create() -> None:
            self._overlap(name, nodes)
            now = self._ctld.now
            if self._process.host not in self._ctld.running:
                self._ctld.doubtful.add(name)  # whoever ends this epilog leaves it
            self._ctld.state.reservations[name] = Held(name, list(nodes), user_id, now, now + 60.0 * minutes)

        await self._change("reserve", name, create)

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        def change() -> None:
            if name not in self._ctld.state.reservations:
                raise SlurmRefused("Requested reservation is invalid")
            self._overlap(name, nodes)
            self._ctld.state.reservations[name].nodes = list(nodes)

        await self._change("reserve", name, change)

    async def delete_reservation(self, name: str) -> bool:
        def delete() -> None:
            if name not in self._ctld.state.reservations:
                raise SlurmRefused("Requested reservation is invalid")
            if any(j.reservation == name and (j.state == PENDING or j.state in ACTIVE) for j in self._jobs()):
                raise SlurmRefused("Requested reservation is busy")
            del self._ctld.state.reservations[name]

        try:
            await self._change("delete", name, delete)
        except SlurmRefused:
            return name not in {r.name for r in await self.read_reservations()}
        return True

    def _pending(self, raw_id: int) -> JobRecord:
        """Raises `SlurmError` unless it waits, or is on its way to that."""
        job = self._ctld.find(raw_id)
        if job.state != PENDING:
            raise SlurmRefused("Job is no longer pending execution")
        return job

    def _allowed(self, job: JobRecord, reservation: str) -> None:
        held = self._ctld.state.reservations.get(reservation)
        if reservation and (held is None or held.user_id != job.user_id):
            raise SlurmRefused("Requested reservation is invalid")

    async def pin_job(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        def pin() -> None:
            record = self._pending(job.raw_id)
            self._allowed(record, reservation)
            if len(self._ctld.known(nodes)) > record.num_nodes:
                raise SlurmRefused("Requested node configuration is not available")
            record.req_nodes, record.reservation = list(nodes), reservation

        await self._change("update", job.id, pin)
        after = await self.read_job(job.raw_id)
        if set(after.req_nodes) != set(nodes) or after.reservation != reservation:
            raise SlurmRefused(f"job {job.id} was pinned to {','.join(nodes)} and has {','.join(after.req_nodes)}")
        return after

    async def set_start_time(self, job: Job, start: str) -> None:
        def change() -> None:
            self._pending(job.raw_id).begin = self._ctld.now + float(start.removeprefix("now").lstrip("+") or 0)

        await self._change("update", job.id, change)

    async def nudge_scheduler(self, job: Job) -> None:
        def nothing() -> None:
            self._pending(job.raw_id)

        await self._change("update", job.id, nothing)

    async def detach_reservation(self, job: Job, previous: str = "") -> None:
        def detach() -> None:
            record = self._ctld.find(job.raw_id)
            self._allowed(record, previous)
            record.reservation = previous

        await self._change("update", job.id, detach)

    async def hold_job(self, job: Job, why: str) -> None:
        def hold() -> None:
            record = self._ctld.find(job.raw_id)
            if record.state == PENDING:
                record.held, record.held_since = "JobHeldUser", self._ctld.now

        await self._change("hold", job.id, hold)

    async def note_end(self, job: Job, line: str, prefix: str) -> None:
        await self._change("note", job.id, lambda: None)  # in slurmdbd: nothing of the job itself changes

    async def requeue_job(self, job: Job) -> None:
        def requeue() -> None:
            record = self._ctld.find(job.raw_id)
            if record.completing or record.state == PENDING:
                raise SlurmRefused("Job is pending or completing")
            if record.state in ACTIVE:
                self._ctld.kill_job(record, PENDING)
            elif record.state in (FAILED, NODE_FAIL, COMPLETED, CANCELLED):
                record.ended, record.restarts = record.restarts, record.restarts + 1
                record.state, record.pending_since = PENDING, self._ctld.now
                record.begin = self._ctld.now + self._ctld.expire_s + 1.0

        await self._change("requeue", job.id, requeue)
