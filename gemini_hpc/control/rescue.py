"""Steering one requeue of one job onto its survivors: reserve, pin, start, let go (DESIGN §6, FACTS §3, §7).

The order matters. The reservation exists before the job leaves COMPLETING, or the next job of a busy cluster takes
the survivors within 0.3 s. The pin is set while COMPLETING (Slurm keeps it) and again once PENDING if it was too
late for that; StartTime only once PENDING (Slurm overwrites an earlier one). The reservation is dropped as soon as
the job runs. Used by the controller and, where there is none, by one survivor's epilog.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gemini_hpc.control import probe
from gemini_hpc.control.decide import Port, candidates, held
from gemini_hpc.control.slurm import SlurmError, SlurmUnreachable, UnknownJob
from gemini_hpc.control.slurm.api import SlurmApi
from gemini_hpc.control.slurm.facts import (
    COMPLETING,
    CONFIGURING,
    FAILED,
    NODE_FAIL,
    PENDING,
    RUNNING,
    Job,
    Node,
)

PREFIX = "gemini_"  # of the names of our reservations
RESERVED_MINUTES = 10
PINNED_S = 60.0  # pinned to all survivors, reserved
REACHABLE_S = 60.0  # then pinned to those that answer, reserved; then the original request, nothing held
HELD_GRACE_S = 3.0
REQUEUE_WAIT_S = 60.0
FAST_POLL_S, SLOW_POLL_S = 0.03, 0.2
SURVEY_S = 0.5
NUDGE_AFTER_S = 0.5
Say = Callable[[str, str, str], None]
Note = Callable[..., None]


@dataclass
class Rescue:
    """One requeue. `say(event, host, detail)` goes to the event log, `note(step, phase, **data)` to the journal."""

    slurm: SlurmApi
    raw_id: int
    restart: int
    user_id: int
    survivors: list[str]
    dead: list[str]
    original: list[str]
    slurmd_port: int
    confirm_s: float
    say: Say
    note: Note
    may_requeue: bool = False
    fence: Callable[[str], Awaitable[bool]] | None = None
    vouched: Callable[[str], bool] = lambda host: False
    own_request: str = ""  # the reservation that the user asked for
    pinned: Callable[[bool], None] = lambda pinned: None
    completing: Callable[[float], None] = lambda seconds: None
    minutes: int = RESERVED_MINUTES
    reservation: str = ""
    own_reservation: bool = False
    _said: set[str] = field(default_factory=set)
    _pinned: tuple[str, ...] | None = None
    _started: bool = False
    _pending_since: float | None = None
    _silent_since: dict[str, float] = field(default_factory=dict)
    _requeued: bool = False
    _at_restart: int = 0
    _nudge_at: float = 0.0
    _completing_since: float | None = None

    def _once(self, event: str, host: str = "", detail: str = "") -> None:
        if event not in self._said:
            self._said.add(event)
            self.say(event, host, detail)

    # ---- the reservation -------------------------------------------------------------------------------

    async def reserve(self, job: Job, nodes: Mapping[str, Node], wanted: int, *, alone: bool = True) -> None:
        """Hold survivors and at most `wanted` candidates. Where that is refused, nothing is held, and it is said.

        alone: whatever else is reserved for this job is left over and goes first (False in an epilog, where another
        survivor may be at the same work).
        """
        if job.reservation and not job.reservation.startswith(PREFIX):
            self.reservation, self.own_reservation = job.reservation, True
            self.say("reserved", "", f"the job's own reservation {job.reservation} is kept")
            return
        others = await self.slurm.reservations()
        if alone:
            for left in [r.name for r in others if self._leftover(r.name)]:
                await self.drop(left)
            others = [r for r in others if not self._leftover(r.name)]
        taken = {n for r in others for n in r.nodes}
        unwanted = await self.slurm.excluded(self.raw_id)
        able = candidates(job, nodes, [*self.survivors, *self.dead, *unwanted], taken)
        idle = [n.name for n in able if n.idle]
        busy = [n.name for n in able if not n.idle]
        if len(idle) < len(self.dead) and busy:
            busy = await self.slurm.free_soonest(busy)
        spare = (idle + busy)[:wanted] if len(idle) < len(self.dead) else idle[:wanted]
        held_now = [n for n in self.survivors if n not in taken]
        name = f"{PREFIX}{self.raw_id}_{secrets.token_hex(6)}"
        for chosen in ([*held_now, *spare], held_now):
            if not chosen:
                continue
            self.note("reserve", "before", name=name, nodes=chosen)
            began = time.monotonic()
            try:
                await self.slurm.create_reservation(name, chosen, self.user_id, self.minutes)
            except SlurmUnreachable:
                raise
            except SlurmError as exc:
                self.note("reserve", "failed", name=name, error=str(exc))
                self.say("reserve_refused", "", f"{','.join(chosen)}: {exc}")
                continue
            self.reservation = name
            self.note("reserve", "after", name=name)
            self.say("reserved", "", f"{','.join(chosen)} as {name} {_ms(began)}")
            return

    def _leftover(self, name: str) -> bool:
        return name.startswith(f"{PREFIX}{self.raw_id}_")

    async def drop(self, name: str) -> None:
        """Detach this job from a reservation of ours and delete it."""
        try:
            job = await self.slurm.job(self.raw_id)
            if job.reservation == name:
                self.note("detach", "before", name=name)
                await self.slurm.detach_reservation(job)
        except SlurmUnreachable:
            raise
        except SlurmError as exc:
            self.note("detach", "failed", error=str(exc))
        self.note("delete", "before", name=name)
        for pause_s in (0.05, 0.1, 0.2, 0.5, 1.0, 0.0):
            if await self.slurm.delete_reservation(name):
                self.note("delete", "after", name=name)
                return
            await self._evict(name)
            await asyncio.sleep(pause_s)
        self.say("reservation_left", "", f"{name} is still referenced; it ends by itself")

    async def _evict(self, name: str) -> None:
        """Detach what else of the same owner has put itself into our reservation: it would take a survivor, and
        keep the reservation from being deleted."""
        for row in await self.slurm.attached(name):
            if row.raw_id == self.raw_id:
                continue
            try:
                job = await self.slurm.job(row.raw_id)
                if job.reservation == name and job.actable:
                    self.note("evict", "before", name=name, job=row.raw_id)
                    await self.slurm.detach_reservation(job)
                    self.say("foreign_detached", "", f"job {job.id} had put itself into {name}")
            except SlurmUnreachable:
                raise
            except SlurmError as exc:
                self._once("foreign_left", "", f"job {row.raw_id} is in {name}: {exc}")

    async def clean(self) -> None:
        """Let go of what is held."""
        if self.reservation and not self.own_reservation:
            began = time.monotonic()
            name, self.reservation = self.reservation, ""
            await self.drop(name)
            self.say("released", "", f"reservation {name} {_ms(began)}")

    # ---- following the job -----------------------------------------------------------------------------

    async def follow(self, limit_s: float = 600.0, *, leave_held: bool = False) -> str:
        """Steer until the job runs again, has ended, or is given up; returns which. Nothing is held then.

        leave_held: when the time is over, the reservation stays until it ends by itself.
        """
        survey = asyncio.ensure_future(self._survey())
        began = time.monotonic()
        try:
            outcome = ""
            while not outcome and time.monotonic() - began < limit_s:
                try:
                    outcome = await self._step(began)
                except SlurmUnreachable:
                    await asyncio.sleep(0.5)
                except SlurmError as exc:
                    # A race (the job has moved on) or a refusal: read again, at a slower pace.
                    self._once("refused", "", str(exc))
                    await asyncio.sleep(SLOW_POLL_S)
                if not outcome:
                    await asyncio.sleep(FAST_POLL_S if time.monotonic() - began < 15 else SLOW_POLL_S)
            if not outcome and leave_held:
                self.reservation = ""
            elif not outcome:
                await self._unpin("given up")
            return outcome or "given up"
        finally:
            survey.cancel()
            await self.clean()

    async def _step(self, began: float) -> str:
        try:
            job = await self.slurm.job(self.raw_id)
        except UnknownJob:
            return "gone"
        again = job.restarts > self.restart
        if job.restarts > self._at_restart:
            # Requeued once more on the way (a failed launch): Slurm has reset the start time.
            self._at_restart, self._pinned, self._started, self._pending_since = job.restarts, None, False, None
        if again and job.state == COMPLETING:
            self._completing_since = self._completing_since or time.monotonic()
        elif self._completing_since is not None:
            self.completing(time.monotonic() - self._completing_since)
            self._completing_since = None
        if again and job.state in (RUNNING, CONFIGURING):
            return await self._runs(job)
        if job.over:
            return await self._ended(job)
        if not again and given_up(job, self.dead):
            return await self._send_back(job, "--no-kill: Slurm lets the job run on without its lost node")
        if not again:
            # Not requeued yet: Slurm acts on DOWN at once; a long wait means that it will not.
            return "not requeued" if time.monotonic() - began > REQUEUE_WAIT_S else ""
        if job.state == COMPLETING:
            self._once("completing")
            await self._pin(job)
        elif job.state == PENDING:
            return await self._pending(job)
        return ""

    async def _runs(self, job: Job) -> str:
        if job.state == CONFIGURING:
            self._once("configuring", "", ",".join(job.nodes))
            await self._drop_lost()  # a node that died on the way up hangs the prolog until it is DOWN
            return ""
        self._once("running", "", f"restart {job.restarts} on {','.join(job.nodes)}")
        return "running"

    async def _ended(self, job: Job) -> str:
        may = self.may_requeue and not self._requeued and job.restarts == self.restart
        if not may or job.state not in (FAILED, NODE_FAIL):
            return job.state
        return await self._send_back(
            job, f"the script had ended {job.state} ({job.exit_code}) after the node's death"
        )

    async def _send_back(self, job: Job, why: str) -> str:
        if self._requeued or not self.may_requeue:
            return ""
        self._requeued = True
        self.note("requeue", "before", state=job.state)
        await self.slurm.requeue(job)
        self.note("requeue", "after")
        self.say("sent_back", "", why)
        return ""

    async def _pending(self, job: Job) -> str:
        now = time.monotonic()
        if self._pending_since is None:
            self._pending_since = now
            self._once("requeued", "", f"PENDING {job.reason}".strip())
        waited = now - self._pending_since
        if held(job.reason) and waited > HELD_GRACE_S:
            self.say("let_go", "", f"pending for {job.reason}: no node can help")
            await self._unpin(f"pending for {job.reason}")
            return "held"
        if waited > PINNED_S + REACHABLE_S or not self.survivors:
            await self._unpin(f"no start after {waited:.0f} s")
            return "unpinned"
        await self._pin(job)
        if not self._started:
            self.note("start", "before")
            began = time.monotonic()
            await self.slurm.set_start_time(job, "now+2")
            self._started = True
            self._nudge_at = time.time() + NUDGE_AFTER_S
            self._once("start_set", "", _ms(began))
        elif job.start_time <= time.time() and self._nudge_at <= time.time():
            # Slurm looks at start times only every sched_interval (60 s by default); an update makes it look now.
            self._nudge_at = time.time() + NUDGE_AFTER_S
            await self.slurm.nudge(job)
        return ""

    async def _unpin(self, why: str) -> None:
        """The original request again, if the job waits and its record has another."""
        job = await self.slurm.job(self.raw_id)
        if job.state != PENDING or not job.actable:
            return
        if set(job.req_nodes) == set(self.original) and job.reservation == self.own_request:
            return
        self.note("pin", "before", nodes=self.original)
        await self.slurm.pin(job, self.original, self.own_request)
        self.pinned(False)
        self._pinned = None
        self.say("unpinned", "", f"{why}: the original request is back")

    async def _pin(self, job: Job) -> None:
        await self._drop_lost()
        nodes = tuple(self.survivors)
        if self._pinned == nodes or not nodes:
            return
        self.note("pin", "before", nodes=list(nodes))
        self.pinned(True)
        began = time.monotonic()
        await self.slurm.pin(job, nodes, self.reservation)
        again, self._pinned = self._pinned is not None, nodes
        self.note("pin", "after")
        self.say("repinned" if again else "pinned", "", f"{','.join(nodes)} {_ms(began)}")

    async def _drop_lost(self) -> None:
        waited = 0.0 if self._pending_since is None else time.monotonic() - self._pending_since
        patience = self.confirm_s if waited < PINNED_S else 0.0
        now = time.monotonic()
        for name in [n for n in self.survivors if n in self._silent_since]:
            if now - self._silent_since[name] < patience:
                continue
            self.survivors.remove(name)
            self.say("survivor_lost", name, "no answer from slurmd")
            fenced = self.fence is not None and await self.fence(name)
            if fenced:
                self.dead.append(name)

    async def _survey(self) -> None:
        """Probe the survivors all the time: a pin on a dead one makes the job hang."""
        targets: dict[str, tuple[str, int]] = {}
        while True:
            began = time.monotonic()
            try:
                if not targets:
                    found = await self.slurm.nodes(self.survivors)
                    targets = {n.name: (n.address, n.port or self.slurmd_port) for n in found.values()}
                doubtful = {n: targets[n] for n in self.survivors if n in targets and not self.vouched(n)}
                seen = await probe.reached(doubtful)
                silent = {name for name, port in seen.items() if port is not Port.ANSWERS}
                self._silent_since = {n: self._silent_since.get(n, began) for n in silent}
                if self.reservation and not self.own_reservation and self._pending_since is not None:
                    await self._evict(self.reservation)
            except SlurmError:
                pass
            await asyncio.sleep(max(SURVEY_S, len(targets) / 500))


def given_up(job: Job, dead: Sequence[str]) -> bool:
    """Whether Slurm has taken its dead nodes out of a job that it lets run on (--no-kill), and will not requeue."""
    return job.state == RUNNING and bool(job.nodes) and bool(dead) and not set(dead) & set(job.nodes)


def _ms(began: float) -> str:
    return f"[{(time.monotonic() - began) * 1000:.0f} ms]"


async def sweep(slurm: SlurmApi, kept: Sequence[str]) -> list[str]:
    """Delete reservations of ours that serve nobody any more (after a takeover); returns their names."""
    dropped = []
    for reservation in await slurm.reservations():
        part = reservation.name.removeprefix(PREFIX).split("_")
        if not reservation.name.startswith(PREFIX) or not part[0].isdigit() or reservation.name in kept:
            continue
        try:
            job = await slurm.job(int(part[0]))
        except UnknownJob:
            await slurm.delete_reservation(reservation.name)
            dropped.append(reservation.name)
            continue
        if job.state == RUNNING or job.over:
            if job.reservation == reservation.name and not job.over:
                await slurm.detach_reservation(job)
            await slurm.delete_reservation(reservation.name)
            dropped.append(reservation.name)
    return dropped
