"""Which recoveries nothing disturbs: of those more is asked than of others.

Chaos excuses much: who is cut off, slow or dead cannot do what he has to. What had a power cut to deal with, and
nothing beside, has no excuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemini_hpc.slurm.facts import COMPLETED, FAILED, PENDING

from .jobs import Wrong
from .slurmctld import SLOW, JobRecord

if TYPE_CHECKING:
    from .site import Site

LOOK_S = 0.5
FAILED_S = 35.0  # so long after its end a job that has lost a node is sent back, a takeover of the backup included
BEFORE_S = 5.0  # so long before a power cut all had to be well
PINNED_S = 110.0  # who has waited longer may go anywhere
SETTLED_S = 20.0  # so long after a slurmctld has started nobody is fenced
POWER, CONTROLLER, OTHER = "power", "controller", "other"


@dataclass(frozen=True)
class Cut:
    """A job lost its first node of an incarnation that had sealed something. nodes: all that it ran on."""

    at: float
    nodes: tuple[str, ...]


class Calm:
    """See the module. It looks at all that faults may have left, every LOOK_S."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._last: dict[str, float] = {}  # by kind of disturbance: when it was there last
        self._lives = 0
        self._began: dict[int, float] = {}  # by job: when its incarnation did
        self._lost: dict[str, float] = {}  # by node: when it lost power last
        self._cuts: dict[tuple[int, int], Cut] = {}
        self._nodes: dict[int, set[str]] = {}  # by job: where it began last
        self.out_of_reach: set[int] = set()  # jobs whose copies may be
        self._hindered: set[tuple[int, int]] = set()  # incarnations that failed, and may stay so
        self._failed: dict[int, int] = {}  # by job: the incarnation whose script has failed
        site.at(LOOK_S, self._look)

    def disturb(self, kind: str) -> None:
        """Something of this kind happens now."""
        self._last[kind] = self.site.world.loop.now

    def since(self, at: float, but: Collection[str]) -> bool:
        """Whether nothing has been wrong since then but these."""
        return all(kind in but or last < at for kind, last in self._last.items())

    def _look(self) -> None:
        self.site.at(LOOK_S, self._look)
        site = self.site
        lives = sum(host.lives for host in site.controllers)
        if lives != self._lives or not all(c.process and c.process.alive for c in site.controllers):
            self._lives = lives
            self.disturb(CONTROLLER)
        if any(is_so() for is_so in self._unwell()):
            self.disturb(OTHER)
        ctld = site.ctld
        if ctld.charge is not ctld.hosts[0] or ctld.now - ctld.boot_time < SETTLED_S + site.settings.slurm_settle_s:
            self.disturb(CONTROLLER if self._host_lost() else OTHER)

    def _host_lost(self) -> bool:
        """Slurm and the controller move to the other host; that is one disturbance."""
        return not all(host.up for host in self.site.hosts)

    def _unwell(self) -> list[Callable[[], bool]]:
        site, ctld, world = self.site, self.site.ctld, self.site.world
        names = [n for n in site.nodes if site.nodes[n].host.up]
        return [
            lambda: bool(world.network.deaf or world.network.slow_s or world.munged or world.full),
            lambda: bool(world.clock.skew_s) or ctld.slow > SLOW,
            lambda: any(p.stopped for n in names for p in site.nodes[n].processes if p.alive),
            lambda: not all(site.slurmds[n].process.alive for n in names),
            lambda: any(n.reboot or (n.drain and not self._by_us(n.reason)) for n in ctld.state.nodes.values()),
            lambda: any(r.maint for r in ctld.state.reservations.values()),
            lambda: any(ctld.state.jobs[number].held for number in site.trainings),
        ]

    @staticmethod
    def _by_us(reason: str) -> bool:
        return reason.startswith("gemini-hpc")

    # ---- what happens to jobs --------------------------------------------------------------------------

    def loses(self, name: str) -> None:
        """A node loses power."""
        now = self.site.world.loop.now
        self.disturb(POWER)
        self._lost[name] = now
        for number, training in self.site.trainings.items():
            job = self.site.ctld.state.jobs[number]
            runs = name in job.nodes and job.scripted and not job.completing and training.state == "running"
            if runs and training.restart == job.restarts and training.sealed_at > self._began.get(number, math.inf):
                self._cuts.setdefault((number, job.restarts), Cut(now, tuple(job.nodes)))

    def script_fails(self, number: int, restart: int) -> None:
        """It ends by itself."""
        self._failed[number] = restart
        self.site.at(FAILED_S, lambda: self._still_failed(number, restart))

    def _still_failed(self, number: int, restart: int) -> None:
        """A job that has lost a node, whose script ended by that, is sent back by now. It may stay FAILED where its
        witnesses were hindered, or too few. A controller that dies is no excuse: the agents tell the next one."""
        job = self.site.ctld.state.jobs[number]
        # Until slurmctld has heard of it the job counts as running; it may complete for long after that.
        left_s = FAILED_S - (self.site.ctld.now - job.end if job.state in (FAILED, COMPLETED) else 0.0)
        if job.restarts == restart and left_s > 0.0:
            self.site.at(left_s + 0.1, lambda: self._still_failed(number, restart))
            return
        cut = self._cuts.get((number, restart))
        if cut is None or not self._alone(cut) or not self.since(cut.at - BEFORE_S, (POWER, CONTROLLER)):
            self._hindered.add((number, restart))

    def excuses_failed(self, number: int) -> bool:
        """Whether nobody could be expected to send it back."""
        return (number, self.site.ctld.state.jobs[number].restarts) in self._hindered

    def _alone(self, cut: Cut) -> bool:
        """Whether one of its nodes was lost, and has not come back."""
        lost = [n for n in cut.nodes if self._lost.get(n, -math.inf) >= cut.at]
        return len(lost) == 1 and not any(self.site.booted.get(n, -math.inf) >= cut.at for n in lost)

    def were_its_own(self, number: int) -> set[str]:
        """Where this job began last."""
        return self._nodes.get(number, set())

    def begins(self, job: JobRecord) -> None:
        """A job starts. After a recovery that nothing has disturbed a protected one is on all its survivors, and no
        other job has been there before."""
        if job.raw_id in self.site.trainings:
            self._copies(job)
            self._began[job.raw_id] = self.site.world.loop.now
        for number in self.site.trainings:
            waiting = self.site.ctld.state.jobs[number]
            left = set(self._survivors(waiting))
            if waiting is job and left - set(job.nodes):
                self._wrong(f"job {number} is on {job.nodes}, and its {sorted(left - set(job.nodes))} are left out")
            elif waiting.state == PENDING and waiting is not job and left & set(job.nodes):
                self._wrong(f"job {job.raw_id} is on {sorted(left & set(job.nodes))}, for which job {number} waits")

    def _wrong(self, text: str) -> None:
        self.site.fail(Wrong(f"survivors: {text}"))

    def _survivors(self, job: JobRecord) -> list[str]:
        """The nodes that are held for a job that comes back, as far as nothing excuses that they are not."""
        restart = job.restarts - 1
        cut = self._cuts.get((job.raw_id, restart))
        if cut is None or self._failed.get(job.raw_id) == restart or not self.since(cut.at - BEFORE_S, (POWER,)):
            return []
        lost = {n for n in cut.nodes if self._lost.get(n, -math.inf) >= cut.at}
        if any(self.site.booted.get(n, -math.inf) >= cut.at for n in lost):
            return []  # nobody may have held anything: Slurm may have sent it back by itself
        if self.site.ctld.now - job.pending_since > PINNED_S:
            return []
        return [n for n in cut.nodes if n not in lost]

    def _copies(self, job: JobRecord) -> None:
        """Whether this incarnation may not find what the last one had: it was lost on purpose, as documented."""
        site, now = self.site, self.site.world.loop.now
        before, self._nodes[job.raw_id] = self._nodes.get(job.raw_id, set()), set(job.nodes)
        # With none of its nodes from before agents know of each other by the controller only (docs/faults.md).
        alone = not before & set(job.nodes) and not self.since(now - BEFORE_S, (POWER,))
        # A save to a tier that is full or broken is given up at once, and what waits is let go of after a while.
        ended = now - (site.ctld.now - job.end)
        late = site.ctld.now - job.pending_since > site.settings.retention_s
        unsaved = bool(site.trainings[job.raw_id].tier[0]) and late and site.tier_well_since > ended - 1.0
        # Agents hold a failed job's memory for the retention time, counted from its end.
        let_go = job.pending_since - job.end > site.settings.retention_s
        if job.restarts and (alone or unsaved or let_go):
            self.out_of_reach.add(job.raw_id)
        else:
            self.out_of_reach.discard(job.raw_id)
