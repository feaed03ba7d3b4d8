"""All that a site can meet, drawn by its seed: several jobs, others that wait, an administrator, faults of all kinds.

Faults end after a while, and the administrator gives back what he has taken; then each training has to come to its
end, but for those that he has cancelled.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable

from .admin import Admin
from .calm import CONTROLLER
from .chaos import FAULTS_S, MENDED_S, RESUMED_S, Chaos
from .kernel import Killed, current
from .moments import BEFORE_DOWN, ON_THE_WAY, Moments
from .site import FILLER, OTHER, Site
from .system import OWNER, story
from .training import Training

THIRD = 3000


class Mix(Chaos):
    """See the module."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.admin = Admin(site)
        self.moments = Moments()
        self.most_lost = self.rng.choice((1, 2, 2, 3, 4))
        self._tier_is = ""
        self._primary_off = False

    def plan(self) -> None:
        for training in self.site.trainings.values():
            training.fails_after_s = self.rng.choice((None, None, None, (0.0, 1.5), (0.0, 4.0), (4.0, 12.0)))
        self.site.send_back = self.admin.send_back
        self.site.when_trained(3, self._begin)

    def _begin(self) -> None:
        kinds = self.kinds()
        mine = self.rng.sample(kinds, self.rng.randint(2, len(kinds)))
        for _ in range(self.rng.choice((0, 1, 2, 3, 5, 8))):
            self.site.at(self.rng.uniform(0.0, FAULTS_S), self.rng.choice(mine))
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            self.site.at(self.rng.uniform(0.0, FAULTS_S), self.rng.choice(self.scenes()))
        for _ in range(self.rng.choice((0, 0, 1, 1, 2, 3))):
            self._strike()
        self.site.at(MENDED_S - 5.0, self.moments.over)
        self.site.at(MENDED_S, self._mend)
        self.site.at(RESUMED_S, self._resume)

    def scenes(self) -> list[Callable[[], None]]:
        """What most runs are about."""
        return [
            *(self._power,) * 3,
            *(self._outage,) * 2,
            *(self._drained_dies,) * 2,
            *(self._ends_early,) * 2,
            *(self._blind,) * 2,
            *(self._crowded,) * 2,
            self._hang,
        ]

    def kinds(self) -> list[Callable[[], None]]:
        return [
            *super().kinds(),
            self._pause,
            self._rank,
            self._damage,
            self._full,
            self._cut_peers,
            self._step_clock,
            self._stale,
            self._wanted,
            self._tier,
            self._tier,
            self._all_lost,
            *(self._administrator,) * 6,
        ]

    def _mend(self) -> None:
        self._primary_back()
        self.site.ctld.slow = 0.02
        if self.site.tier is not None:
            self._tier_well()
        self.site.world.clock.skew_s.clear()
        super()._mend()

    def _resume(self) -> None:
        self.admin.restore()
        self.admin.drained.clear()
        super()._resume()

    def _some(self) -> Training:
        running = [t for t in self.site.trainings.values() if t.state == "running"]
        return self.rng.choice(running or [self.site.training])

    # ---- at moments of a recovery ----------------------------------------------------------------------

    def _strike(self) -> None:
        """Something happens just when, or soon after, a recovery comes to some moment."""
        moment = self.rng.choice(self.rng.choice((BEFORE_DOWN, ON_THE_WAY)))
        after_s = self.rng.choice((0.0, 0.0, self.rng.uniform(0.0, 0.5), self.rng.uniform(0.0, 5.0)))
        what = self.rng.choice(
            (
                *(self._controller_dies,) * 5,
                *(self._cancelled,) * (3 if moment in BEFORE_DOWN else 1),
                self._requeued,
                self._held_back,
                self._power_of,
                self._power_of,
                self._survivor_drained,
                lambda number: self._slurmctld(),
                lambda number: self._cut(),
                lambda number: self._hang(),
                lambda number: self._agent(),
            )
        )

        def now(number: int) -> None:
            self.site.tell(f"{moment} of job {number}")
            if what == self._controller_dies:
                self._controller_dies(number)
            elif after_s == 0.0:
                what(number)
            else:
                self.site.at(after_s, lambda: what(number))

        self.moments.at(moment, now)

    def _controller_dies(self, number: int) -> None:
        within = self.rng.choice((0, 0, 1, 3, 10, 30, 100))
        self.site.tell(f"the controller dies within {within} turns", CONTROLLER)
        current().dies_in = within

    def _cancelled(self, number: int) -> None:
        self.admin.cancel(number)

    def _requeued(self, number: int) -> None:
        self.admin.requeue(number, hold=self.rng.random() < 0.3)
        self.site.at(self.rng.uniform(1.0, 30.0), lambda: self.admin.release(number))

    def _held_back(self, number: int) -> None:
        self.admin.hold(number)
        self.site.at(self.rng.uniform(1.0, 30.0), lambda: self.admin.release(number))

    def _survivors(self, number: int) -> list[str]:
        return [name for name in self.site.trainings[number].names if self.site.nodes[name].host.up]

    def _power_of(self, number: int) -> None:
        """One more node of this job's loses power."""
        if len(self._lost) < self.most_lost and (names := self._survivors(number)):
            self._lose(self.rng.choice(names))

    def _survivor_drained(self, number: int) -> None:
        if names := self._survivors(number):
            name = self.rng.choice(names)
            self.admin.drain(name)
            self.site.at(self.rng.uniform(1.0, 40.0), lambda: self.admin.resume(name))

    # ---- scenes ----------------------------------------------------------------------------------------

    def _lose(self, name: str) -> None:
        if name not in self._lost and self.site.nodes[name].host.up:
            self._lost.append(name)
            self.site.power_off(name)

    def _outage(self) -> None:
        """Several nodes lose power at about one time, of one job or of several."""
        names = sorted({name for training in self.site.trainings.values() for name in training.names})
        count = min(len(names), self.rng.randint(2, 4))
        within_s = self.rng.choice((0.0, 1.0, 5.0, 15.0))
        for name in self.rng.sample(names, count):
            self.site.at(self.rng.uniform(0.0, within_s), lambda name=name: self._lose(name))  # type: ignore[misc]

    def _cut_one(self, training: Training) -> None:
        names = [name for name in training.names if self.site.nodes[name].host.up]
        if training.state == "running" and names and len(self._lost) < self.most_lost:
            self._lose(self.rng.choice(names))

    def _ends_early(self) -> None:
        """A node is lost, and the script ends by itself before anybody has noticed."""
        training = self._some()
        training.fails_after_s = (0.0, 1.0)
        self._cut_one(training)

    def _blind(self) -> None:
        """The same, and the controller dies meanwhile: its host may, where there is another one."""
        host, after_s = self.site.controllers[0], self.rng.uniform(0.0, 4.0)
        lost = len(self.site.hosts) > 1 and self.rng.random() < 0.6

        def dies() -> None:
            if lost and not self._primary_off:
                self._lose_primary()
            else:
                self.site.tell("the controller dies", CONTROLLER)
                host.kill(0)

        self._ends_early()
        self.site.at(after_s, dies)

    def _lose_primary(self) -> None:
        """slurmctld's host loses power, and the controller there."""
        self._primary_off = True
        self.site.tell("the primary's host loses power", CONTROLLER)
        host = self.site.controllers[0]
        host.restarts = False
        if host.process is not None:
            host.process.kill()
        self.site.world.network.power_off(self.site.hosts[0])

    def _primary_back(self) -> None:
        if self._primary_off:
            self._primary_off = False
            self.site.tell("the primary's host is back")
            self.site.world.network.power_on(self.site.hosts[0])
            self.site.ctld.start(self.site.hosts[0].name)
            self.site.controllers[0].restarts = True
            self.site.controllers[0].start()

    def _crowded(self) -> None:
        """Others' jobs wait for every node that is free, or will be; then one is lost."""
        training = self._some()
        training.fails_after_s = None
        for _ in range(self.rng.randint(4, 10)):
            runs_s = self.rng.uniform(5.0, 40.0)
            self.site.ctld.submit(FILLER, OTHER, 1, priority=self.rng.choice((-10, 20)), runs_s=runs_s)
        self.site.at(self.rng.uniform(0.5, 4.0), lambda: self._cut_one(training))

    def _drained_dies(self) -> None:
        """A node is drained, loses power a while after, and boots; it is given back at the end of all."""
        name = self.site.victim()
        if not self.site.nodes[name].host.up:
            return
        self.admin.drain(name)
        after_s = self.rng.uniform(0.5, 12.0)
        self.site.at(after_s, lambda: self._lose(name))
        self.site.at(after_s + self.rng.uniform(6.0, 20.0), lambda: self.site.power_on(name))

    # ---- faults ----------------------------------------------------------------------------------------

    def _pause(self) -> None:
        training = self._some()
        name, lasts = self.rng.choice(training.names), self.rng.choice((0.1, 0.7, 2.0, 5.0))
        seat = self.site.nodes[name].seats.get(training.number)
        if seat is not None and (process := seat.process) is not None and process.alive:
            self.site.tell(f"agent of job {training.number} on {name} is stopped for {lasts} s")
            process.stop()
            self.site.at(lasts, process.resume)

    def _rank(self) -> None:
        training = self._some()
        launch = training.launches[-1] if training.launches else None
        if launch is not None and not launch.over:
            rank = self.rng.choice(sorted(launch.ranks))
            self.site.tell(f"rank {rank} of {launch.step} is killed")
            launch.ranks[rank].process.kill()
            training.rank_died(launch)

    def _damage(self) -> None:
        """A bit flips in a copy that is complete."""
        training = self._some()
        name = self.rng.choice(training.names)
        seat = self.site.nodes[name].seats.get(training.number)
        shards = list(seat.agent.store) if seat is not None and seat.agent is not None else []
        found = [(s, i) for s in shards for i in (0, 1) if s.pair.slots[i].state == "complete"]
        if not found:
            return
        shard, index = self.rng.choice(found)
        slot = shard.pair.slots[index]
        self.site.tell(f"a bit flips on {name} in {slot.stamp} of shard {shard.rank} of job {training.number}")
        at = self.rng.randrange(slot.bytes_used)
        byte = os.pread(shard.memory[index].fd, 1, at)
        os.pwrite(shard.memory[index].fd, bytes([byte[0] ^ 1]), at)
        training.gone(name)

    def _full(self) -> None:
        name, lasts = self.site.victim(), self.rng.choice((0.5, 3.0))
        self.site.tell(f"directories of jobs on {name} are full for {lasts} s")
        self.site.world.full.add(name)
        self.site.at(lasts, lambda: self.site.world.full.discard(name))

    def _cut_peers(self) -> None:
        a, b = self.rng.sample(list(self.site.nodes), 2)
        lasts, both = self.rng.choice((0.2, 1.0, 3.0, 8.0)), self.rng.random() < 0.6
        self.site.tell(f"link {a} {'and' if both else 'to'} {b} is cut for {lasts} s")
        self.site.world.network.cut(a, b, both=both)
        self.site.at(lasts, lambda: self.site.world.network.mend(a, b))

    def _step_clock(self) -> None:
        """A host's time of day jumps, by less than MUNGE bears."""
        name, by = self.rng.choice([*self._ctls, *self.site.nodes]), self.rng.uniform(-50.0, 50.0)
        by = by / 5 if name in self._ctls else by
        self.site.tell(f"the clock of {name} jumps by {by:.1f} s")
        self.site.world.clock.skew_s[name] = by

    def _stale(self) -> None:
        lasts = self.rng.uniform(1.0, 15.0)
        self.site.tell(f"slurmctld answers late for {lasts:.1f} s")
        self.site.ctld.slow = 0.6

        def over() -> None:
            self.site.ctld.slow = 0.02

        self.site.at(lasts, over)

    def _tier(self) -> None:
        """Full, slow, hanging, broken, not there, and no workers for it."""
        if self.site.tier is None or self._tier_is:
            return
        faults, kind = (
            self.site.tier.system.faults,
            self.rng.choice(["full", "slow", "hangs", "broken", "gone", "refuses"]),
        )
        lasts, much = self.rng.uniform(1.0, 40.0), self.rng.choice((0.1, 0.5, 1.0))
        self.site.tell(f"the tier: {kind} for {lasts:.1f} s")
        self._tier_is, self.site.tier_well_since = kind, math.inf
        if kind == "full":
            faults.full = much
        elif kind == "slow":
            faults.slow_s = 10.0 * much
        elif kind == "hangs":
            faults.hangs = True
        elif kind == "broken":
            faults.broken = much
        elif kind == "gone":
            self.site.tier.system.vanish()
        else:
            self.site.tier.refuses = much
        self.site.at(lasts, self._tier_well)

    def _tier_well(self) -> None:
        tier = self.site.tier
        if tier is not None and self._tier_is:
            self.site.tell("the tier is well")
            tier.system.over()
            if self._tier_is == "gone":
                tier.system.come_back()
            tier.refuses, self._tier_is = 0.0, ""
            self.site.tier_well_since = self.site.world.loop.now

    def _all_lost(self) -> None:
        """All nodes of the job with a tier lose power."""
        if self.site.tier is not None and not self._lost and self.site.training.state == "running":
            for name in self.site.training.names:
                if self.site.nodes[name].host.up:
                    self._lost.append(name)
                    self.site.power_off(name)

    def _wanted(self) -> None:
        """Somebody wants several nodes."""
        if self.site.ctld.charge is not None:
            runs_s = self.rng.uniform(5.0, 40.0)
            self.site.ctld.submit(
                FILLER, THIRD, self.rng.randint(1, 3), priority=self.rng.choice((-5, 5, 30)), runs_s=runs_s
            )

    # ---- the administrator -----------------------------------------------------------------------------

    def _administrator(self) -> None:
        admin, number = self.admin, self._some().number
        name, after_s = self.rng.choice(list(self.site.nodes)), self.rng.uniform(1.0, 40.0)
        what = self.rng.choice(
            ("drain", "drain", "down", "reboot", "maintain", "requeue", "hold", "suspend", "suspend", "cancel")
        )
        if what == "drain":
            admin.drain(name)
            self.site.at(after_s, lambda: admin.resume(name))
        elif what == "down":
            admin.down(name)
        elif what == "reboot":
            admin.reboot(name, asap=self.rng.random() < 0.5)
        elif what == "maintain":
            names = self.rng.sample(list(self.site.nodes), self.rng.randint(1, 3))
            admin.maintain(names, after_s=self.rng.choice((0.0, 0.0, 20.0)), lasts_s=after_s)
        elif what == "requeue":
            admin.requeue(number)
        elif what == "hold":
            admin.requeue(number, hold=self.rng.random() < 0.5)
            admin.hold(number)
            self.site.at(after_s, lambda: admin.release(number))
        elif what == "suspend":
            admin.suspend(number)
            self.site.at(after_s, lambda: admin.go_on(number))
        elif self.rng.random() < 0.3:
            admin.cancel(number)


def mix(seed: int) -> Site:
    """Anything, for half a minute; then all is mended, and the trainings have to come to their ends."""
    rng = random.Random(seed)
    size, others = rng.randint(2, 4), [rng.randint(2, 3) for _ in range(rng.choice((0, 1, 1, 2)))]
    site = Site(
        seed,
        nodes=max(4, size + sum(others) + rng.choice((-1, 0, 0, 1, 1, 2, 3))),
        size=size,
        fillers=rng.choice((0, 0, 0, 6, 12, 20)),
        backup=rng.random() < 0.3,
        settle_s=rng.choice((5.0, 15.0)),
        budget=rng.choice((1, 2, 2)),
        user_budget=rng.choice((1, 2)),
        auto_resume_s=rng.choice((0.0, 4.0, 8.0)),
        tier=rng.random() < 0.35,
    )
    for size in others:
        site.add(rng.choice((OWNER, OTHER, THIRD)), size, replicas=min(size, rng.randint(1, 3)))
    Mix(site).plan()
    return site


def run(seed: int, broken: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """(what went wrong or "", the story) of one seed. Only once in a process. broken: breaks the code on purpose."""
    broken()
    site = mix(seed)
    try:
        site.run()
    except (Exception, Killed) as error:
        return f"{type(error).__name__}: {error}", story(site.world)
    return "", story(site.world)
