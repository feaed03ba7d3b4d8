"""slurmctld in memory: what it keeps of jobs, nodes and reservations, and what it does with them.

It does what Slurm 22.05 was seen to do: a node that is set DOWN sends its jobs back; a job that was sent back starts
again when its credentials have expired, or at the start time that it is given while it is pending; whoever is next in
the queue takes a free node that nobody has reserved. It may be killed: it comes back with what it had saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gemini_hpc.slurm.errors import SlurmRefused, UnknownJob
from gemini_hpc.slurm.facts import (
    CANCELLED,
    COMPLETED,
    COMPLETING,
    CONFIGURING,
    FAILED,
    NODE_FAIL,
    PENDING,
    RUNNING,
    Job,
    Node,
    Reservation,
    SlurmConfig,
)

from .kernel import START_S
from .network import Host
from .slurmd import Slurmd
from .system import World

TICK_S, PING_S = 0.5, 5.0
SCHED_S = 30.0  # the scheduler runs so often by itself, and after each change
TRAP_S = 1.5  # who starts sooner than that after a requeue finds the credentials revoked
TAKE_OVER_S = 20.0
SLOW = 0.02  # of the answers take long, and are not true any more when they come
SUSPENDED = "SUSPENDED"
ACTIVE = (CONFIGURING, RUNNING, SUSPENDED)
ON = {"IGNORE_JOBS", "FLEX", "NO_HOLD_JOBS_AFTER"}


@dataclass
class JobRecord:
    """One job. kind: who runs its script; runs_s: how long that takes, or its limit; no_kill: it runs on without
    nodes that are DOWN; `after`: the state that follows COMPLETING; `ended`: the incarnation that completes; `held`:
    why it may not start."""

    raw_id: int
    user_id: int
    num_nodes: int
    kind: str
    priority: int = 0
    requeue: bool = True
    no_kill: bool = False
    runs_s: float = 86400.0
    state: str = PENDING
    reason: str = ""
    nodes: list[str] = field(default_factory=list)
    req_nodes: list[str] = field(default_factory=list)
    reservation: str = ""
    restarts: int = 0
    ready: list[str] = field(default_factory=list)
    scripted: bool = False
    completing: list[str] = field(default_factory=list)
    after: str = ""
    ended: int = 0
    batch_host: str = ""
    begin: float = 0.0
    start: float = 0.0
    end: float = 0.0
    pending_since: float = 0.0
    exit_code: int = 0
    held: str = ""
    held_since: float = 0.0

    @property
    def shown(self) -> str:
        """Its state, as squeue has it."""
        return COMPLETING if self.completing else self.state


@dataclass
class NodeRecord:
    """One node. `heard`: when its slurmd last answered; `reboot`: REQUESTED or ISSUED by an administrator, `asap`
    with a drain."""

    name: str
    down: bool = False
    drain: bool = False
    reason: str = ""
    boot: float = 0.0
    slurmd_start: float = 0.0
    heard: float = 0.0
    silent: bool = False
    reboot: str = ""
    asap: bool = False


@dataclass
class Held:
    """One reservation. maint: an administrator's."""

    name: str
    nodes: list[str]
    user_id: int
    start: float
    end: float
    maint: bool = False


@dataclass
class State:
    """What is saved."""

    jobs: dict[int, JobRecord] = field(default_factory=dict)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    reservations: dict[str, Held] = field(default_factory=dict)


class Slurmctld:
    """All of Slurm but its slurmds. hosts: of slurmctld, the primary first."""

    def __init__(
        self, world: World, hosts: list[Host], slurmds: dict[str, Slurmd], *, timeout_s: float = 60.0
    ) -> None:
        self.world, self.hosts, self.slurmds, self.timeout_s = world, hosts, slurmds, timeout_s
        self.rng = world.rng
        self.expire_s = self.rng.choice((5.0, 120.0))
        self.state, self.disk = State(), State()
        self.running = {host.name: True for host in hosts}
        self.charge: Host | None = hosts[0]
        self.boot_time = self.now - 3600.0
        self.changed_by_us: Callable[[str, str], None] = lambda what, name: None
        self.job_over: Callable[[int, str], None] = lambda raw_id, state: None
        self.node_taken: Callable[[int], None] = lambda raw_id: None
        self.job_begins: Callable[[JobRecord], None] = lambda job: None
        self.doubtful: set[str] = set()  # reservations that were there when a slurmctld died, or that an epilog made
        self.kills, self.slow = 0, SLOW
        self._next_id, self._saving, self._scheduling = 7, False, False
        self._gone_since: float | None = None
        for name, slurmd in slurmds.items():
            self.state.nodes[name] = NodeRecord(name, boot=slurmd.boot, slurmd_start=slurmd.boot, heard=self.now)
            slurmd.ctld = self
        self.disk = copy.deepcopy(self.state)
        self._ticks = 0
        world.network.at(world.loop.now + TICK_S, self._tick)

    @property
    def now(self) -> float:
        """Unix time, as its host has it."""
        skew_s = self.world.clock.skew_s.get(self.charge.name, 0.0) if self.charge is not None else 0.0
        return START_S + self.world.loop.now + skew_s

    # ---- its own life ----------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """This host's slurmctld ends; what it has not saved is lost."""
        self.world.tell(f"slurmctld on {name} is killed")
        self.running[name] = False
        self.kills += 1
        self.doubtful |= self.state.reservations.keys() | self.disk.reservations.keys()
        if self.charge is not None and self.charge.name == name:
            self.charge = None
            for part in ("jobs", "nodes", "reservations"):
                setattr(self.state, part, copy.deepcopy(getattr(self.disk, part)))

    def start(self, name: str) -> None:
        """It is back: the primary takes charge, a backup only where nobody is."""
        host = next(h for h in self.hosts if h.name == name)
        self.running[name] = True
        if host is self.hosts[0] or self.charge is None:
            self._take_charge(host)

    def _take_charge(self, host: Host) -> None:
        self.world.tell(f"slurmctld on {host.name} is in charge")
        self.charge, self.boot_time, self._gone_since = host, self.now, None
        for node in self.state.nodes.values():
            node.heard = self.now
        # Reading its state, slurmctld ends what runs on a node that is DOWN in it, and does not requeue it.
        for job in list(self.state.jobs.values()):
            if job.state in ACTIVE and any(self.state.nodes[n].down for n in job.nodes):
                self.kill_job(job, NODE_FAIL)

    def _backup(self) -> None:
        now = self.world.loop.now
        for host in self.hosts:
            if host is self.charge and not host.up:
                self.kill(host.name)
        if self.charge is None:
            self._gone_since = now if self._gone_since is None else self._gone_since
            up = [h for h in self.hosts if self.running[h.name] and h.up]
            if up and now - self._gone_since >= TAKE_OVER_S:
                self._take_charge(up[0])

    def changed(self) -> None:
        """It is saved a moment later, part by part, and the scheduler runs."""
        if not self._saving:
            self._saving = True
            for part, most_s in (("jobs", 0.4), ("nodes", 1.5), ("reservations", 1.5)):
                self.world.network.at(self.world.loop.now + self.rng.uniform(0.0, most_s), self._save, part)
        if not self._scheduling:
            self._scheduling = True
            self.world.network.at(self.world.loop.now + self.rng.uniform(0.02, 0.25), self._scheduled)

    def _save(self, part: str) -> None:
        self._saving = False
        if self.charge is not None:
            setattr(self.disk, part, copy.deepcopy(getattr(self.state, part)))

    def save_all(self) -> None:
        """What an administrator is told is done is saved."""
        self.disk = copy.deepcopy(self.state)

    def _scheduled(self) -> None:
        self._scheduling = False
        if self.charge is not None:
            self.schedule()

    def _tick(self) -> None:
        self.world.network.at(self.world.loop.now + TICK_S, self._tick)
        self._ticks += 1
        self._backup()
        if self.charge is None:
            return
        if self._ticks % int(PING_S / TICK_S) == 0:
            for node in self.state.nodes.values():
                self._ping(node)
        self._expire()
        self.work()
        if self._ticks % int(SCHED_S / TICK_S) == 0:
            self.schedule()

    # ---- nodes -----------------------------------------------------------------------------------------

    def hears(self, name: str) -> bool:
        """Whether packets go to this node and back."""
        charge, host = self.charge, self.slurmds[name].node.host
        network = self.world.network
        return charge is not None and network.hears(charge, host) and network.hears(host, charge)

    def _ping(self, node: NodeRecord) -> None:
        slurmd = self.slurmds[node.name]
        if self.hears(node.name) and slurmd.answers:
            node.heard = self.now
            self._registered(node, slurmd)
            return
        silent_s = self.now - node.heard
        node.silent = silent_s > self.timeout_s / 3
        if silent_s > self.timeout_s and not node.down:
            self.world.tell(f"Slurm finds {node.name} DOWN by itself")
            node.reason = node.reason if node.drain else "Not responding"
            self.set_down(node.name)

    def _registered(self, node: NodeRecord, slurmd: Slurmd) -> None:
        rebooted = slurmd.boot != node.boot
        node.boot, node.slurmd_start, node.silent = slurmd.boot, slurmd.boot, False
        if node.down:  # ReturnToService=2
            node.down = False
            self.changed()
        if rebooted and node.reboot == "ISSUED":
            node.reboot, node.drain = "", node.drain and not node.asap
            self.changed()
        for raw_id, restart in slurmd.jobs():
            job = self.state.jobs.get(raw_id)
            mine = job is not None and node.name in job.nodes and (job.state in ACTIVE or job.completing)
            if job is None or not mine or restart != (job.ended if job.completing else job.restarts):
                slurmd.deliver(slurmd.terminate, raw_id, restart, "", False)
        for job in list(self.state.jobs.values()):
            lost = job.state == RUNNING and job.scripted and node.name == job.batch_host
            if lost and (job.raw_id, job.restarts) not in slurmd.jobs() and not job.completing:
                why = "has booted" if rebooted else "does not know it"
                self.world.tell(f"job {job.raw_id}: its batch host {node.name} {why}")
                self.kill_job(job, PENDING if job.requeue else NODE_FAIL)

    def set_down(self, name: str) -> None:
        """DOWN: its jobs are sent back."""
        node = self.state.nodes[name]
        node.down = True
        for job in list(self.state.jobs.values()):
            if name in job.completing:
                job.completing.remove(name)
                job.nodes = list(job.completing)
                self._completed(job)
            elif name in job.nodes and job.state == RUNNING and job.no_kill:
                job.nodes.remove(name)
                self.node_taken(job.raw_id)
            elif name in job.nodes and job.state in ACTIVE:
                self.kill_job(job, PENDING if job.requeue else NODE_FAIL)
        self.changed()

    # ---- jobs ------------------------------------------------------------------------------------------

    def submit(self, kind: str, user_id: int, num_nodes: int, *, priority: int = 0, runs_s: float = 86400.0) -> int:
        """A new job; its id."""
        raw_id, self._next_id = self._next_id, self._next_id + 1
        job = JobRecord(raw_id, user_id, num_nodes, kind, priority=priority, runs_s=runs_s, begin=self.now)
        self.state.jobs[raw_id] = job
        self.changed()
        return raw_id

    def kill_job(self, job: JobRecord, after: str) -> None:
        """What runs of it ends; then it is pending again, or over."""
        job.ended, job.after = job.restarts, after
        if after == PENDING:
            job.restarts += 1
        job.state, job.end = after, self.now
        job.completing = [n for n in job.nodes if not self.state.nodes[n].down]
        job.nodes = list(job.completing)
        self.world.tell(f"job {job.raw_id} restart {job.ended} is COMPLETING on {','.join(job.nodes)}, then {after}")
        self._completed(job)
        self.changed()
        self.work()

    def cancel(self, job: JobRecord) -> None:
        """scancel, in any state."""
        if job.completing:
            job.after = job.state = CANCELLED
        elif job.state in ACTIVE:
            self.kill_job(job, CANCELLED)
        elif job.state == PENDING:
            job.state, job.end = CANCELLED, self.now
            self.world.tell(f"job {job.raw_id} is {CANCELLED}")
            self.job_over(job.raw_id, CANCELLED)

    def _completed(self, job: JobRecord) -> None:
        if job.completing or not job.after:
            return
        after, job.after, job.nodes, job.ready, job.scripted = job.after, "", [], [], False
        job.state = after
        if after == PENDING:
            job.pending_since, job.begin = self.now, self.now + self.expire_s + 1.0
        else:
            self.job_over(job.raw_id, after)
        self.world.tell(f"job {job.raw_id} is {after}")
        self.changed()

    def work(self) -> None:
        """Tell nodes again what they have not done yet."""
        for job in list(self.state.jobs.values()):
            for name in job.completing:
                if self.hears(name):
                    code = "" if job.after == PENDING else str(job.exit_code)
                    batch_up = self.slurmds[job.batch_host].node.host.up if job.batch_host else True
                    self.slurmds[name].deliver(
                        self.slurmds[name].terminate, job.raw_id, job.ended, code, not batch_up
                    )
            if job.completing or job.state not in ACTIVE:
                continue
            for name in job.nodes:
                if name not in job.ready and self.hears(name):
                    slurmd = self.slurmds[name]
                    slurmd.deliver(slurmd.prolog, job.raw_id, job.restarts, tuple(job.nodes), job.kind)
            if len(job.ready) == len(job.nodes) and job.state != SUSPENDED:
                job.state = RUNNING
                if not job.scripted and self.hears(job.batch_host):
                    slurmd, left_s = self.slurmds[job.batch_host], job.runs_s
                    slurmd.deliver(slurmd.batch, job.raw_id, job.restarts, tuple(job.nodes), job.kind, left_s)

    # ---- what slurmds say ------------------------------------------------------------------------------

    def ready(self, name: str, raw_id: int, restart: int) -> None:
        """A prolog is over."""
        job = self.state.jobs.get(raw_id)
        if (
            job
            and job.restarts == restart
            and job.state == CONFIGURING
            and name in job.nodes
            and name not in job.ready
        ):
            job.ready.append(name)
            self.changed()
            self.work()

    def begun(self, raw_id: int, restart: int) -> None:
        """The script runs."""
        job = self.state.jobs.get(raw_id)
        if job and job.restarts == restart and job.state == RUNNING and not job.scripted:
            job.scripted = True
            self.changed()

    def script_ended(self, raw_id: int, restart: int, code: int) -> None:
        """The script has ended."""
        job = self.state.jobs.get(raw_id)
        if job and job.restarts == restart and job.state == RUNNING and not job.completing:
            job.exit_code = code
            self.kill_job(job, FAILED if code else COMPLETED)

    def node_ended(self, name: str, raw_id: int, restart: int) -> None:
        """An epilog is over."""
        job = self.state.jobs.get(raw_id)
        if job and name in job.completing and job.ended == restart:
            job.completing.remove(name)
            job.nodes = list(job.completing)
            self._completed(job)
            self.changed()

    # ---- the scheduler ---------------------------------------------------------------------------------

    def _expire(self) -> None:
        for name in [r.name for r in self.state.reservations.values() if r.end <= self.now]:
            del self.state.reservations[name]
            for job in self.state.jobs.values():
                job.reservation = "" if job.reservation == name else job.reservation
            self.changed()

    def used_by(self, name: str) -> list[JobRecord]:
        """What runs or ends on a node."""
        return [j for j in self.state.jobs.values() if name in j.nodes and (j.completing or j.state in ACTIVE)]

    def reserved_by(self, name: str) -> list[Held]:
        """The reservations that a node is in."""
        return [r for r in self.state.reservations.values() if name in r.nodes]

    def schedule(self) -> None:
        """Whoever can start does, in order of priority."""
        waiting = [j for j in self.state.jobs.values() if j.state == PENDING and not j.completing]
        for job in sorted(waiting, key=lambda j: (-j.priority, j.raw_id)):
            if job.held or job.begin > self.now:
                job.reason = job.held or "BeginTime"
                continue
            free = [n for n in self.state.nodes if self._free(n, job)]
            if set(job.req_nodes) - set(free):
                dead = any(self.state.nodes[n].down or self.state.nodes[n].drain for n in job.req_nodes)
                job.reason = "ReqNodeNotAvail" if dead else "Resources"
                continue
            others = [n for n in free if n not in job.req_nodes]
            missing = job.num_nodes - len(job.req_nodes)
            if len(others) < missing:
                job.reason = "Resources"
                continue
            self._begin(job, [*job.req_nodes, *self.rng.sample(others, missing)])

    def _free(self, name: str, job: JobRecord) -> bool:
        node = self.state.nodes[name]
        usable = not (node.down or node.drain or node.silent or node.reboot or self.used_by(name))
        # What slurmctld has forgotten of a job is ended when the node registers, before the job begins there again.
        left = any(raw_id == job.raw_id for raw_id, _ in self.slurmds[name].jobs())
        return usable and not left and all(r.name == job.reservation for r in self.reserved_by(name))

    def _begin(self, job: JobRecord, names: list[str]) -> None:
        if job.restarts and self.now - job.pending_since < TRAP_S:
            job.state, job.end, job.reason = FAILED, self.now, "Job credential revoked"
            self.world.tell(f"job {job.raw_id}: credential revoked")
            self.job_over(job.raw_id, FAILED)
            return
        job.state, job.reason, job.start, job.nodes = CONFIGURING, "", self.now, sorted(names)
        job.ready, job.scripted, job.batch_host = [], False, min(names)
        self.world.tell(f"job {job.raw_id} restart {job.restarts} starts on {','.join(job.nodes)}")
        self.job_begins(job)
        self.changed()
        self.work()

    # ---- what is asked ---------------------------------------------------------------------------------

    def find(self, raw_id: int) -> JobRecord:
        """Raises `UnknownJob`."""
        job = self.state.jobs.get(raw_id)
        if job is None or (job.state not in (PENDING, *ACTIVE) and not job.completing and self.now - job.end > 300.0):
            raise UnknownJob(f"job {raw_id} is not known")
        return job

    def known(self, names: Iterable[str]) -> list[str]:
        """Raises `SlurmError`."""
        found = list(names)
        if unknown := [n for n in found if n not in self.state.nodes]:
            raise SlurmRefused(f"Node {unknown[0]} not found")
        return found

    def job_facts(self, raw_id: int) -> Job:
        """As squeue tells."""
        job = self.find(raw_id)
        over = job.shown not in (PENDING, COMPLETING, *ACTIVE)
        end = job.end if over or job.completing else job.start + job.runs_s if job.nodes else 0.0
        return Job(
            id=str(raw_id), raw_id=raw_id, state=job.shown, reason=job.reason, user_id=job.user_id, user="user",
            nodes=tuple(job.nodes), req_nodes=tuple(job.req_nodes), num_nodes=job.num_nodes, restarts=job.restarts,
            may_requeue=job.requeue, partition="all", reservation=job.reservation, features="", array_job_id=None,
            array_task_id="", is_het=False, is_batch=True, min_cpus=1,
            min_memory_mb=1, start_time=job.begin if job.shown == PENDING else job.start, end_time=end,
            exit_code=f"{job.exit_code}:0", gres_per_node={},
        )  # fmt: skip

    def node_facts(self, name: str) -> Node:
        """As `scontrol show node` tells."""
        node, used = self.state.nodes[name], self.used_by(name)
        state = "DOWN" if node.down else "ALLOCATED" if used else "IDLE"
        flags = {"DRAIN"} if node.drain else set()
        flags |= {"NOT_RESPONDING"} if node.silent else set()
        flags |= {"COMPLETING"} if any(j.completing for j in used) else set()
        held = [r for r in self.reserved_by(name) if r.start <= self.now]
        flags |= {"MAINT"} if any(r.maint for r in held) else {"RESERVED"} if held else set()
        flags |= {f"REBOOT_{node.reboot}"} if node.reboot else set()
        return Node(
            name=name, state=state, flags=frozenset(flags), address=name, port=0, partitions=("all",),
            features=frozenset(), cpus=8, memory_mb=64000, reason=node.reason, boot_time=node.boot,
            slurmd_start=node.slurmd_start, hostname=name,
        )  # fmt: skip

    def reservation_facts(self) -> list[Reservation]:
        """As `scontrol show reservation` tells."""
        return [
            Reservation(
                r.name,
                tuple(r.nodes),
                (str(r.user_id),),
                "ACTIVE" if r.start <= self.now else "INACTIVE",
                frozenset({"MAINT", "IGNORE_JOBS", "SPEC_NODES"} if r.maint else ON),
                r.start,
            )
            for r in self.state.reservations.values()
        ]

    def config_facts(self, state_save: str) -> SlurmConfig:
        """As `scontrol show config` tells."""
        return SlurmConfig(tuple((h.name, h.address) for h in self.hosts), state_save, self.boot_time, {})
