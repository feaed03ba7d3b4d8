"""A whole site in one thread: nodes with production agents, Slurm, the production controller, jobs.

What must hold is looked at all the time: no healthy node is set DOWN or drained by us, no job is changed but one that
has lost a node, the budget of fencing is kept, ranks resume from what was sealed, nothing is held for a job that has
ended, and no task of production code dies of a fault of its own.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable

from gemini_hpc.config import Settings
from gemini_hpc.controller.reservation import PREFIX
from gemini_hpc.slurm.facts import COMPLETED, FAILED, LIVE, RUNNING

from . import controlhost, system
from .calm import OTHER as OTHER_FAULT
from .calm import POWER, Calm
from .controlhost import ControlHost, Log
from .jobs import Wrong
from .kernel import Stuck
from .node import Node
from .slurmctld import Slurmctld
from .slurmd import Slurmd, Work
from .system import World
from .tier import JOB, Tier
from .training import Training

FILLER = "filler"
OTHER = 2000
BOOT_GRACE_S = 5.0  # a node that has just booted may be held for dead a moment longer
WAKE_GRACE_S = 0.5  # an action on a node that hung is based on facts so old at most, its own command included
HELD_S = 90.0  # nothing is held for a job that has ended so long ago
RESERVED_S = 660.0  # but for what nobody deletes, or slurmctld forgets to have deleted: that ends by itself
KNOWN_S = 15.0  # whoever has run for so long is known to the controller
TIER_WELL_S = 90.0  # after so long without a fault of the tier's, all that is saved there is found
LIMIT_S = 1500.0


class Filler:
    """A job of somebody else's; a `slurmd.Work`."""

    def __init__(self, world: World) -> None:
        self.world = world

    def prolog(self, node: Node, raw_id: int, restart: int, nodes: tuple[str, ...]) -> None:
        self.world.clock.sleep(self.world.rng.uniform(0.02, 0.3))

    def begin(self, raw_id: int, restart: int, nodes: tuple[str, ...], ended: Callable[[int], None]) -> None: ...

    def kill(self, node: Node, raw_id: int) -> None: ...

    def epilog(self, node: Node, raw_id: int, restart: int, code: str, nodes: tuple[str, ...]) -> None:
        self.world.clock.sleep(self.world.rng.uniform(0.02, 0.4))


class Site:
    """One simulated cluster. `fillers`: jobs of another user's, each for a whole node."""

    def __init__(
        self,
        seed: int,
        *,
        nodes: int = 5,
        size: int = 3,
        replicas: int = 2,
        fillers: int = 0,
        backup: bool = False,
        settle_s: float = 15.0,
        budget: int = 2,
        user_budget: int = 2,
        auto_resume_s: float = 0.0,
        tier: bool = False,
        mode: str = "act",
    ) -> None:
        gc.disable()  # what a collector ends runs its `finally` blocks
        self.world = World(seed)
        system.install(self.world)
        controlhost.install(self.world, seed)
        self.rng = random.Random(seed ^ 0x517E)
        self.problem: BaseException | None = None
        names = ["ctl", "ctl2"][: 1 + backup]
        self.settings = Settings(
            cluster_name="sim",
            memory_floor_bytes=0,
            controller_host=",".join(names),
            retention_s=120.0,
            slurm_settle_s=settle_s,
            fence_budget_nodes=budget,
            fence_budget_user_nodes=user_budget,
            auto_resume_s=auto_resume_s,
            failure_domains="none",
            mode=mode,
            canary_partitions=("all",) if mode == "canary" else (),
        )
        self.hosts = [self.world.network.add(name) for name in names]
        self.nodes = {f"n{i}": Node(self.world, f"n{i}", self.settings) for i in range(1, nodes + 1)}
        self.place = tempfile.mkdtemp(prefix="gemini-sim-site-")
        self.world.paths[self.place] = "/site"
        self.training = Training(
            self.world, 0, self.nodes, size, replicas=replicas, pause_s=self.rng.choice((0.2, 0.4))
        )
        self.training.state_save, self.training.on_wrong = f"{self.place}/save", self.fail
        self.work: dict[str, Work] = {"training": self.training, FILLER: Filler(self.world)}
        self.slurmds = {
            name: Slurmd(self.world, node, self.settings.slurmd_port, self.work) for name, node in self.nodes.items()
        }
        self.ctld = self.training.ctld = Slurmctld(self.world, self.hosts, self.slurmds)
        self.ctld.changed_by_us, self.ctld.job_over = self._changed, self._over
        Log(self.world, lambda text: self.fail(Wrong(f"fault: {text}")))
        self.controllers = [
            ControlHost(
                self.world,
                host,
                self.settings,
                self.ctld,
                self.place,
                lambda text: self.fail(Wrong(f"fault: {text}")),
            )
            for host in self.hosts
        ]
        self.fenced: list[tuple[float, str]] = []
        self.hit: set[int] = set()  # jobs that have lost a node
        self.booted: dict[str, float] = {}
        self._woke: dict[str, float] = {}  # nodes that hung
        self.over: set[int] = set()  # protected jobs that have ended
        self.ended_by_admin: set[int] = set()
        self.forgetful = False  # reservations may be left to end by themselves
        self.send_back: Callable[[int], None] | None = None  # does so with a failed job, where its user would
        self._seen = 0
        self.back_s = 0.0  # from the power cut until the job ran again
        self.trainings: dict[int, Training] = {}
        self.calm = Calm(self)
        self.ctld.job_begins, self.ctld.node_taken = self.calm.begins, self._node_taken
        self._submit(self.training, "training", self.rng.choice((0, 10)))
        self._fillers = fillers
        self.at(1.0, self._fill)
        self.checks: list[Callable[[], None]] = []  # when all is over
        self.tier = self._tier() if tier else None
        self.tier_well_since = 0.0

    def _tier(self) -> Tier:
        """Of the first job, whose number the simulated tier knows."""
        assert self.training.number == JOB
        root = f"{self.place}/tier"
        os.mkdir(root)
        tier = Tier(self.world, root)
        tier.install()

        def newest() -> int:
            well = self.world.loop.now - self.tier_well_since > TIER_WELL_S
            return max((stamp.version for stamp in tier.offered()[:1]), default=0) if well else 0

        self.training.tier, self.training.on_tier = (root, self.rng.choice((1, 3, 10))), newest
        self.checks.append(tier.audit)
        return tier

    def _submit(self, training: Training, kind: str, priority: int) -> None:
        training.number = self.ctld.submit(kind, training.user_id, training.size, priority=priority)
        self.trainings[training.number] = training
        training.on_excuse = lambda: training.number in self.calm.out_of_reach
        training.on_failed = lambda restart: self.calm.script_fails(training.number, restart)
        self.world.owners[training.number] = training.user_id

    def add(self, user_id: int, size: int, *, replicas: int = 2, priority: int = 0) -> Training:
        """One more protected job."""
        training = Training(
            self.world, 0, self.nodes, size, replicas=replicas, pause_s=self.rng.choice((0.2, 0.4)), user_id=user_id
        )
        training.state_save, training.on_wrong, training.ctld = f"{self.place}/save", self.fail, self.ctld
        kind = f"training {len(self.trainings) + 1}"
        self.work[kind] = training
        self._submit(training, kind, priority)
        return training

    # ---- running ---------------------------------------------------------------------------------------

    def at(self, after_s: float, what: Callable[[], None]) -> None:
        """So much later."""
        self.world.network.at(self.world.loop.now + after_s, what)

    def tell(self, text: str, kind: str = OTHER_FAULT) -> None:
        """A line of the story: a fault, of which kind."""
        self.world.tell(f"FAULT {text}")
        self.calm.disturb(kind)

    def fail(self, problem: BaseException) -> None:
        """The first one counts."""
        if self.problem is None:
            self.world.tell(f"WRONG {problem}")
            self.problem = problem
        self.world.loop.stop()

    def run(self) -> None:
        """Until all trainings have ended and all is free. Raises what went wrong."""
        loop = self.world.loop
        loop.after_turn = self._look
        self.at(LIMIT_S, lambda: self.fail(Wrong(f"liveness: after {LIMIT_S:g} s the job is {self._state()}")))
        try:
            loop.run_forever()
        except Stuck:
            raise Wrong("nothing happens any more") from None
        finally:
            logging.getLogger("gemini_hpc.controller").handlers.clear()
            for place in (self.place, *(node.root for node in self.nodes.values())):
                shutil.rmtree(place, ignore_errors=True)
        if self.problem is not None:
            raise self.problem

    def _state(self) -> str:
        jobs = [self.ctld.state.jobs.get(number) for number in self.trainings]
        return ", ".join(f"{j.shown} {j.reason} restart {j.restarts} on {j.nodes}" if j else "gone" for j in jobs)

    def _look(self) -> None:
        for _, text in self.world.story[self._seen :]:
            if text.startswith("FAILED") or " error v" in text:
                self.fail(Wrong(f"production code failed: {text}"))
        self._seen = len(self.world.story)
        if self.tier is not None and self.tier.wrong:
            self.fail(Wrong(f"tier: {self.tier.wrong[0]}"))

    def _fill(self) -> None:
        for _ in range(self._fillers):
            priority = self.rng.choice((-10, 20))
            self.ctld.submit(FILLER, OTHER, 1, priority=priority, runs_s=self.rng.uniform(10.0, 60.0))

    # ---- what must hold --------------------------------------------------------------------------------

    def _changed(self, what: str, name: str) -> None:
        """slurmctld does what somebody has asked for."""
        self.world.tell(f"Slurm: {what} {name}")
        now = self.world.loop.now
        if self.settings.mode == "observe":
            self.fail(Wrong(f"observed only: {what} {name}"))
        if what in ("drain", "down"):
            if (
                self.nodes[name].host.up
                and now - self.booted.get(name, -1e9) > BOOT_GRACE_S
                and now - self._woke.get(name, -1e9) > WAKE_GRACE_S
                and not self._seems_dead(name)
            ):
                self.fail(Wrong(f"healthy: {name} has power, and is set {what}"))
            if what == "down":
                self.fenced.append((now, name))
            self._budget(now)
        elif what == "reserve":
            self._nobody_elses(now, name)
        elif what in ("update", "requeue") and int(name) not in self.hit:
            self.fail(Wrong(f"changed: job {name} has lost no node"))

    def _seems_dead(self, name: str) -> bool:
        """Whether nothing on the node runs, and no controller's host reaches its kernel: nobody can know better."""
        network, host = self.world.network, self.nodes[name].host
        reached = any(network.hears(h, host) and network.hears(host, h) for h in self.hosts)
        return not reached and all(p.stopped for p in self.nodes[name].processes if p.alive)

    def _budget(self, now: float) -> None:
        window = {n for t, n in self.fenced if t > now - self.settings.fence_budget_window_s}
        if len(window) > self.settings.fence_budget_nodes:
            self.fail(Wrong(f"budget: {sorted(window)} are fenced"))
        users: dict[int, set[str]] = {}
        for node in window:
            if found := re.search(r"job (\d+) restart", self.ctld.state.nodes[node].reason):
                users.setdefault(self.trainings[int(found[1])].user_id, set()).add(node)
        if any(len(nodes) > self.settings.fence_budget_user_nodes for nodes in users.values()):
            self.fail(Wrong(f"budget of a user: {users} are fenced"))

    def _nobody_elses(self, now: float, reservation: str) -> None:
        """No node of another owner's protected job is reserved by us, unless it has just begun, and is not known."""
        if reservation in self.ctld.doubtful:
            return  # an epilog holds it, which does not know which jobs are protected
        held = self.ctld.state.reservations[reservation]
        for job in self.ctld.state.jobs.values():
            if job.raw_id not in self.trainings or job.user_id == held.user_id or job.state != RUNNING:
                continue
            # Its own nodes are survivors, though another's job may have begun there while it was FAILED.
            candidates = set(held.nodes) - self.calm.were_its_own(int(reservation.removeprefix(PREFIX).split("_")[0]))
            if self.ctld.now - job.start > KNOWN_S and (both := set(job.nodes) & candidates):
                self.fail(Wrong(f"candidates: {sorted(both)} of job {job.raw_id} are in {reservation}"))

    def _over(self, raw_id: int, state: str) -> None:
        if raw_id not in self.trainings:
            return
        well = state == COMPLETED and not self.trainings[raw_id].cut_short
        if not well and raw_id not in self.ended_by_admin:
            # a survivor's script may end before anybody has noticed: then it is sent back
            restart = self.ctld.state.jobs[raw_id].restarts
            self.at(60.0, lambda: self._given_up(raw_id, restart, state))
            return
        self.over.add(raw_id)
        self.at(self._held_s(raw_id), lambda: self._all_free(raw_id))
        if self.done:
            self.at(RESERVED_S, self._ended)

    def _node_taken(self, raw_id: int) -> None:
        """Of a job with --no-kill: its step is ended, and its script goes on to its end."""
        training = self.trainings[raw_id]
        self.at(self.rng.uniform(0.01, 0.3), lambda restart=training.restart: training._fails(restart))  # type: ignore[misc]

    def _held_s(self, raw_id: int) -> float:
        """Nothing is held for this job so long after its end. A failed one may be sent back by its user."""
        failed = self.ctld.state.jobs[raw_id].state == FAILED
        flush_s = self.settings.tier_flush_s if self.trainings[raw_id].tier[0] else 0.0
        return HELD_S + flush_s + (self.settings.retention_s if failed else 0.0)

    @property
    def done(self) -> bool:
        """Whether all protected jobs have ended."""
        return self.over == self.trainings.keys()

    def _given_up(self, raw_id: int, restart: int, state: str) -> None:
        job = self.ctld.state.jobs[raw_id]
        if (job.restarts, job.state) == (restart, state):
            if state == FAILED and self.send_back is not None and self.calm.excuses_failed(raw_id):
                self.send_back(raw_id)
                return
            self.fail(Wrong(f"ended: the job is {state}"))

    def _all_free(self, raw_id: int) -> None:
        nodes = self.nodes.items()
        agents = [name for name, node in nodes if (seat := node.seats.get(raw_id)) is not None and seat.agent]
        held = [] if self.forgetful else self._reserved(f"{PREFIX}{raw_id}_")
        held = [name for name in held if name not in self.ctld.doubtful]
        named = self.ctld.state.jobs[raw_id].state in LIVE
        if agents or held or named:
            held_s = self._held_s(raw_id)
            self.fail(Wrong(f"held {held_s:g} s after the end: agents {agents}, reservations {held}, job {named}"))
        if self.done and not self._reserved() and not self._still_looked_at():
            self._ended()

    def _still_looked_at(self) -> bool:
        """Whether a job has ended so lately that it has not been looked at since."""
        now = self.ctld.now
        return any(now - self.ctld.state.jobs[n].end < self._held_s(n) - 1.0 for n in self.trainings)

    def _reserved(self, prefix: str = PREFIX) -> list[str]:
        return [name for name in self.ctld.state.reservations if name.startswith(prefix)]

    def _ended(self) -> None:
        if self._reserved():
            self.fail(Wrong(f"held {RESERVED_S:g} s after the end: {self._reserved()}"))
        for check in self.checks:
            try:
                check()
            except Wrong as exc:
                self.fail(exc)
        self.world.loop.stop()

    # ---- faults ----------------------------------------------------------------------------------------

    def when_trained(self, version: int, what: Callable[[], None]) -> None:
        """As soon as so many steps are sealed; once."""
        before = self.training.on_seen

        def seen(kind: str, at: int) -> None:
            before(kind, at)
            if kind == "sealed" and at >= version and self.training.on_seen is seen:
                self.training.on_seen = before
                self.at(self.rng.uniform(0.0, 1.0), what)

        self.training.on_seen = seen

    def last(self, more: int) -> None:
        """The trainings end after so many more steps."""
        for training in self.trainings.values():
            training.steps = training.trained + more

    def power_off(self, name: str) -> None:
        """A node loses power."""
        self.tell(f"power cut of {name}", POWER)
        self.calm.loses(name)
        self.nodes[name].power_off()
        for training in self.trainings.values():
            training.lost(self.nodes[name])
        self.hit |= {j.raw_id for j in self.ctld.used_by(name)}
        self.hit |= {number for number in self.trainings if name in self.ctld.state.jobs[number].req_nodes}

    def power_on(self, name: str) -> None:
        """It boots."""
        node = self.nodes[name]
        if not node.host.up:
            node.power_on()
            self.booted[name] = self.world.loop.now
            self.slurmds[name].booted()

    def hang(self, name: str, lasts: float, then: Callable[[], None] = lambda: None) -> None:
        """All its processes stop for so many seconds."""
        self.tell(f"{name} hangs for {lasts:.1f} s")
        stopped = [p for p in self.nodes[name].processes if p.alive]
        for process in stopped:
            process.stop()

        def go_on() -> None:
            self._woke[name] = self.world.loop.now
            self.tell(f"{name} goes on")
            for process in stopped:
                process.resume()
            then()

        self.at(lasts, go_on)

    def restart_slurmd(self, name: str) -> None:
        """slurmd alone is started anew."""
        if self.nodes[name].host.up and not self.slurmds[name].process.alive:
            self.slurmds[name].restarted()

    def victim(self) -> str:
        """Some node of a training's."""
        trainings = [t for t in self.trainings.values() if t.state == "running"] or [self.training]
        training = trainings[0] if len(trainings) == 1 else self.rng.choice(trainings)
        return self.rng.choice(training.names)
