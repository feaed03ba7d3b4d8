"""The steering of one requeue of one job onto its survivors: reserve, pin, start, release.

The order matters. The reservation exists before the job leaves COMPLETING (`reservation`). The pin is set during
COMPLETING (Slurm keeps it), and again in PENDING if that was too late. StartTime is set only in PENDING, because
Slurm overwrites an earlier one. The controller uses this module, and without a controller one survivor's epilog
does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gemini_hpc import clock
from gemini_hpc.controller import tasks
from gemini_hpc.controller.requeue_rules import is_held
from gemini_hpc.controller.reservation import Held, Note, Say, describe_ms
from gemini_hpc.controller.survivors import Survivors
from gemini_hpc.slurm import SlurmError, SlurmUnreachable
from gemini_hpc.slurm.api import SlurmApi, find_job
from gemini_hpc.slurm.facts import (
    COMPLETED,
    COMPLETING,
    CONFIGURING,
    CUT_SHORT,
    PENDING,
    RUNNING,
    Job,
    Node,
)

PINNED_S = 60.0  # so long pinned to all survivors, with the reservation
# then so long pinned to the survivors that answer, with the reservation; then the original request without a
# reservation
REACHABLE_S = 60.0
HELD_GRACE_S = 3.0  # a pending reason that no node can cure must last this long
REQUEUE_WAIT_S = 60.0  # Slurm requeues at once after DOWN; after this long it never will
GOES_ON_S = 15.0  # time for a job's agents to go on with spares in the place of lost nodes
# pauses between queries about the job in its first 15 s, first PINNED_S, and later
FAST_POLL_S, SLOW_POLL_S, PATIENT_POLL_S = 0.03, 0.2, 0.5
# pause in answer times of Slurm, so that queries keep it busy for a quarter of the time; its limit
REST, MOST_REST_S = 3.0, 1.0
SURVEY_S = 0.5  # pause between two probes of the survivors
ASK_S = 2.0  # interval of the query which nodes Slurm would allocate
NUDGE_AFTER_S = 0.5  # pause between two updates that make Slurm check start times


@dataclass
class Requeue:
    """The requeue of one job.

    `log_event(event, host, detail)` writes to the event log, `write_journal(step, phase, **data)` to the journal.
    """

    slurm: SlurmApi
    raw_id: int
    restart: int
    survivors: Survivors
    held: Held
    original: list[str]
    log_event: Say
    write_journal: Note
    may_requeue: bool = False
    own_request: str = ""  # the user's own reservation
    on_pin: Callable[[bool], None] = lambda pinned: None
    on_completing: Callable[[float], None] = lambda seconds: None
    on_read: Callable[[Job], None] = lambda job: None  # called with the job each time it is read from Slurm
    has_gone_on: Callable[[], bool] = lambda: False  # whether the job's agents go on without its dead nodes
    has_finished: Callable[[], bool] = lambda: False  # whether the training has succeeded
    # whether the agents may go on with the nodes that are left
    may_go_on: Callable[[Sequence[str]], bool] = lambda left: False
    explain_hold: Callable[[], str] = lambda: ""  # why the job must be held instead of running again
    on_hold: Callable[[int], None] = lambda restart: None  # called when the job is held before this life
    length_s: float = math.inf  # the job's length, for reservations that begin meanwhile
    _kept: tuple[str, ...] = ()  # the survivors for which the reservation was made or adapted last
    _pinned: tuple[str, ...] | None = None
    _has_started: bool = False
    _pending_since: float | None = None
    _asked_at: float = -math.inf
    _nodes: dict[str, Node] = field(default_factory=dict)
    _has_requeued: bool = False
    _goes_ahead: bool = False  # the job need not be held
    _at_restart: int = 0
    _nudge_at: float = 0.0
    _completing_since: float | None = None

    async def reserve_nodes(self, job: Job, nodes: Mapping[str, Node], wanted: int, *, is_alone: bool = True) -> None:
        """Hold survivors and at most `wanted` candidates, and one more for each survivor that cannot be pinned.

        A second call holds more than before.
        """
        self._nodes = dict(nodes)
        await self._exclude_nodes(job)
        await self.survivors.probe_survivors(nodes)
        self.held.wanted = wanted + len(self.survivors.list_left_out(is_patient=True))
        if self.held.name:
            await self._adapt(job)
        else:
            keep, without = self._choose_survivors()
            await self.held.reserve_nodes(job, self._nodes, keep, without, is_alone=is_alone)
            self._kept = keep

    def _choose_survivors(self) -> tuple[tuple[str, ...], set[str]]:
        """Return the survivors that a pin may name, and the job's other nodes."""
        out = self.survivors.list_left_out(is_patient=self._measure_wait_s() < PINNED_S)
        return tuple(n for n in self.survivors.names if n not in out), {*self.survivors.dead, *out}

    async def _adapt(self, job: Job) -> None:
        keep, without = self._choose_survivors()
        await self.held.adapt_nodes(job, self._nodes, keep, without)
        self._kept = keep

    async def _exclude_nodes(self, job: Job) -> None:
        """Exclude the nodes that Slurm would not allocate to this job."""
        partitions, reservations = await asyncio.gather(self.slurm.read_partitions(), self.slurm.read_reservations())
        own = {self.held.name, self.own_request, job.reservation}
        survivors = set(self.survivors.names)
        others = [
            r
            for r in reservations
            # A reservation of another recovery that holds our survivors does not count: they are taken back.
            if r.name not in own and not self.held.is_mine(r.name) and not self._may_take(r.name, survivors)
        ]
        self.survivors.exclude_nodes(job, self._nodes, partitions, others, self.length_s)
        self._asked_at = clock.monotonic()

    def _may_take(self, name: str, survivors: set[str]) -> bool:
        theirs = self.held.find_survivors(name)
        return theirs is not None and not survivors & set(theirs)

    # ---- following the job -----------------------------------------------------------------------------

    async def steer_requeue(self, limit_s: float = 600.0, *, leave_held: bool = False) -> str:
        """Steer until the job runs again, has ended, or is given up. Return the outcome.

        No reservation is held then, except with `leave_held`.

        Args:
            limit_s: Time limit in seconds.
            leave_held: Whether the job waits on in the reservation when the time is over; the reservation ends by
                itself. The pin is removed: a survivor that is drained later would keep the job from starting, and
                no program would remove the pin.
        """
        survey = tasks.start("survey", self._watch_survivors, lambda why: self.log_event("task_died", "", why))
        began, stopped = clock.monotonic(), False
        try:
            outcome = ""
            while not outcome and clock.monotonic() - began < limit_s:
                asked = clock.monotonic()
                try:
                    outcome = await self._step(began)
                except SlurmUnreachable:
                    await asyncio.sleep(0.5)
                except SlurmError as exc:
                    # A race (the job has moved on) or a refusal: read again, at a slower pace.
                    self.held.log_once("refused", "", str(exc))
                    await asyncio.sleep(SLOW_POLL_S)
                if not outcome:
                    now = clock.monotonic()
                    await asyncio.sleep(_choose_pause_s(now - began, now - asked))
            if not outcome and leave_held:
                reservation, self.held.name = self.held.name or self.own_request, ""
                await self._unpin("the job does not start", reservation)
            elif not outcome:
                await self._unpin("the job does not start")
            return outcome or "given up"
        except asyncio.CancelledError:
            stopped = True  # the controller steps down: the next one takes over the reservation from its journal
            raise
        finally:
            survey.cancel()
            if not stopped:
                await self.held.release_reservation()

    async def _step(self, began: float) -> str:
        if (job := await find_job(self.slurm, self.raw_id)) is None:
            return "gone"
        self.on_read(job)
        again = job.restarts > self.restart
        if job.restarts > self._at_restart:
            # Requeued once more on the way (a failed launch): Slurm has reset the start time.
            self._at_restart, self._pinned, self._has_started, self._pending_since = job.restarts, None, False, None
        if again and job.state == COMPLETING:
            self._completing_since = self._completing_since or clock.monotonic()
        elif self._completing_since is not None:
            self.on_completing(clock.monotonic() - self._completing_since)
            self._completing_since = None
        if again and job.state in (RUNNING, CONFIGURING):
            return await self._report_running(job)
        if job.has_ended:
            return await self._send_back_if_cut_short(job)
        if not again and is_given_up(job, self.survivors.dead):
            if self.has_gone_on():
                self.log_event(
                    "goes_on", "", f"without {','.join(self.survivors.dead)}: a spare of its own has taken over"
                )
                return "goes on"
            if self.has_finished():
                self.log_event("goes_on", "", f"without {','.join(self.survivors.dead)}: the training had finished")
                return "goes on"
            if self.may_go_on(job.nodes) and clock.monotonic() - began < GOES_ON_S:
                self.held.log_once("spared", "", "waiting for the job's agents to go on with a spare")
                return ""
            return await self._send_back(job, "--no-kill: Slurm lets the job run on without its lost node")
        if not again:
            # Not requeued yet: Slurm acts on DOWN at once; after a long wait, it never will.
            return "not requeued" if clock.monotonic() - began > REQUEUE_WAIT_S else ""
        if job.state == COMPLETING:
            self.held.log_once("completing", "", "")
            await self._pin(job)
        elif job.state == PENDING:
            return await self._steer_pending(job)
        return ""

    async def _report_running(self, job: Job) -> str:
        if job.state == CONFIGURING:
            # The survey goes on: a node that dies during the start hangs the prolog until it is DOWN.
            self.held.log_once("configuring", "", ",".join(job.nodes))
            return ""
        self.held.log_once("running", "", f"restart {job.restarts} on {','.join(job.nodes)}")
        return "running"

    async def _send_back_if_cut_short(self, job: Job) -> str:
        may = self.may_requeue and job.may_requeue and not self._has_requeued and job.restarts == self.restart
        well = job.state == COMPLETED and (self.has_finished() or self.has_gone_on())
        if not may or job.state not in CUT_SHORT or well:
            return job.state
        return await self._send_back(
            job, f"the batch script ended as {job.state} ({job.exit_code}) after the node's death"
        )

    async def _send_back(self, job: Job, why: str) -> str:
        if self._has_requeued or not self.may_requeue:
            return ""
        self._has_requeued = True
        self.write_journal("requeue", "before", state=job.state)
        await self.slurm.requeue_job(job)
        self.write_journal("requeue", "after")
        self.log_event("sent_back", "", why)
        return ""

    async def _steer_pending(self, job: Job) -> str:
        now = clock.monotonic()
        if self._pending_since is None:
            self._pending_since = now
            self.held.log_once("requeued", "", f"PENDING {job.reason}".strip())
        if not self._goes_ahead:
            if why := self.explain_hold():
                return await self._hold_job(job, why)
            self._goes_ahead = True
        waited = now - self._pending_since
        if is_held(job.reason) and waited > HELD_GRACE_S:
            self.log_event("let_go", "", f"pending for {job.reason}: no node can help")
            await self._unpin(f"pending for {job.reason}")
            return "held"
        if waited > PINNED_S + REACHABLE_S or not (self.survivors.names or self.held.name):
            await self._unpin(f"no start after {waited:.0f} s")
            return "unpinned"
        if not await self._pin(job):
            return ""
        if not self._has_started:
            await self._set_start(job)
        elif job.start_time <= clock.time() and self._nudge_at <= clock.time():
            # Slurm checks start times only every sched_interval (60 s by default); an update makes it check now.
            self._nudge_at = clock.time() + NUDGE_AFTER_S
            await self.slurm.nudge_scheduler(job)
        return ""

    async def _set_start(self, job: Job) -> None:
        self.write_journal("start", "before")
        began = clock.monotonic()
        await self.slurm.set_start_time(job, "now+2")
        self._has_started = True
        self._nudge_at = clock.time() + NUDGE_AFTER_S
        self.held.log_once("start_set", "", describe_ms(began))

    async def _hold_job(self, job: Job, why: str) -> str:
        self.write_journal("hold", "before")
        await self.slurm.hold_job(job, why)
        self.on_hold(job.restarts)
        self.write_journal("hold", "after")
        self.log_event("held", "", why)
        await self._unpin("held")
        return "held"

    async def _unpin(self, why: str, reservation: str | None = None) -> None:
        """Restore the original request if the job waits with another one.

        `reservation` replaces the user's own reservation.
        """
        job = await self.slurm.read_job(self.raw_id)
        wanted = self.own_request if reservation is None else reservation
        states = (PENDING,) if reservation is None else (PENDING, COMPLETING)
        if job.state not in states or not job.is_actable:
            return
        if set(job.req_nodes) == set(self.original) and job.reservation == wanted:
            return
        self.write_journal("pin", "before", nodes=self.original)
        await self.slurm.pin_job(job, self.original, wanted)
        self.on_pin(False)
        self._pinned = None
        self.log_event("unpinned", "", f"{why}: restored the job's original node request")

    def _measure_wait_s(self) -> float:
        return 0.0 if self._pending_since is None else clock.monotonic() - self._pending_since

    async def _pin(self, job: Job) -> bool:
        """Pin the job to the survivors that can be pinned. Return False while nothing is known of them."""
        if not self.survivors.is_surveyed:
            return False
        nodes = self.survivors.list_pinnable(is_patient=self._measure_wait_s() < PINNED_S)
        if self._pinned == nodes or not (nodes or self.held.name):
            return True
        if self._has_started and not set(self._pinned or ()) <= set(nodes):
            await self._set_start(job)  # leaves time to fence the survivor that is left out
        if self._kept != nodes:
            await self._adapt(job)  # Slurm prefers reserved nodes, pinned or not
        self.write_journal("pin", "before", nodes=list(nodes))
        self.on_pin(True)
        began = clock.monotonic()
        await self.slurm.pin_job(job, nodes, self.held.name)
        again, self._pinned = self._pinned is not None, nodes
        self.write_journal("pin", "after")
        self.log_event(
            "repinned" if again else "pinned", "", f"{','.join(nodes) or 'no survivor'} {describe_ms(began)}"
        )
        return True

    async def _watch_survivors(self) -> None:
        """Probe the survivors continuously.

        A pin to a dead node makes the job hang. A pin to a drained node makes it wait.
        """
        while True:
            began = clock.monotonic()
            try:
                await self._poll()
            except SlurmUnreachable:
                pass
            except SlurmError as exc:
                self.held.log_once("refused", "", str(exc))
            await asyncio.sleep(max(SURVEY_S, len(self.survivors.names) / 500 - (clock.monotonic() - began)))

    async def _poll(self) -> None:
        ask = clock.monotonic() - self._asked_at >= ASK_S or not self._nodes
        if ask:
            self._nodes = await self.slurm.read_nodes()
            job = await self.slurm.read_job(self.raw_id)
            await self._exclude_nodes(job)
        await self.survivors.probe_survivors(self._nodes)
        if self._pending_since is None:
            return
        await self.held.evict_jobs()
        if ask and job.state == PENDING:
            await self._adapt(job)


def _choose_pause_s(followed_s: float, answer_s: float) -> float:
    """Return the pause in seconds before the next query about the job.

    The pause grows with the time that the job has been followed, up to half a second. Queries keep a slow Slurm
    busy for at most a quarter of the time.
    """
    usual_s = FAST_POLL_S if followed_s < 15 else SLOW_POLL_S if followed_s < PINNED_S else PATIENT_POLL_S
    return max(usual_s, min(REST * answer_s, MOST_REST_S))


def is_given_up(job: Job, dead: Sequence[str]) -> bool:
    """Return whether Slurm runs the job on without its dead nodes (--no-kill) and will not requeue it.

    Seen on Slurm 22.05: with `--no-kill` for sbatch alone, a node that is set DOWN ends a running step at once, and
    the job goes on. With it for srun, too, the step ends with its other tasks, with status 0, unless the node is dead
    without being DOWN. If the batch script's node is lost, the job stays RUNNING without a script.
    """
    return job.state == RUNNING and bool(job.nodes) and bool(dead) and not set(dead) & set(job.nodes)
