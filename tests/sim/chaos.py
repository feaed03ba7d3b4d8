"""Faults of all kinds on one site, drawn by its seed."""

from __future__ import annotations

from collections.abc import Callable

from .calm import CONTROLLER
from .site import Site

FAULTS_S, MENDED_S, RESUMED_S = 35.0, 70.0, 90.0
MOST_LOST = 2  # nodes; a job of two copies may lose what it has if more go


class Chaos:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self.site, self.rng = site, site.rng
        self._lost: list[str] = []
        self.most_lost = MOST_LOST
        self._ctls = [host.name for host in site.hosts]

    def plan(self) -> None:
        """Draw what will happen once the training is on."""
        self.site.training.fails_after_s = None  # with too few witnesses left such a job stays failed
        self.site.forgetful = True
        self.site.when_trained(3, self._begin)

    def kinds(self) -> list[Callable[[], None]]:
        """What may happen."""
        return [
            self._power,
            self._power,
            self._controller,
            self._controller,
            self._slurmctld,
            self._cut,
            self._hang,
            self._slurmd,
            self._slow,
            self._munge,
            self._agent,
        ]

    def _begin(self) -> None:
        kinds = self.kinds()
        mine = self.rng.sample(kinds, self.rng.randint(2, len(kinds)))
        for _ in range(self.rng.randint(1, 9)):
            self.site.at(self.rng.uniform(0.0, FAULTS_S), self.rng.choice(mine))
        self.site.at(MENDED_S, self._mend)
        self.site.at(RESUMED_S, self._resume)

    def _mend(self) -> None:
        """Everything is there again."""
        self.site.tell("none any more")
        self.site.world.network.heal()
        for name in self._lost:
            self.site.power_on(name)

    def _resume(self) -> None:
        """An administrator gives nodes back that have booted."""
        for node in self.site.ctld.state.nodes.values():
            node.down = node.drain = False
        self.site.ctld.changed()
        self.site.last(60)

    # ---- faults ----------------------------------------------------------------------------------------

    def _power(self) -> None:
        names = sorted({name for training in self.site.trainings.values() for name in training.names})
        up = [name for name in names if self.site.nodes[name].host.up]
        if len(self._lost) < self.most_lost and up:
            name = self.rng.choice(up)
            self._lost.append(name)
            self.site.power_off(name)
            if self.rng.random() < 0.3:
                self.site.at(self.rng.uniform(1.0, 20.0), lambda: self.site.power_on(name))

    def _controller(self) -> None:
        within = self.rng.choice((0, 1, 3, 10, 30, 100))
        self.site.tell(f"the controller dies within {within} turns", CONTROLLER)
        self.rng.choice(self.site.controllers).kill(within)

    def _slurmctld(self) -> None:
        name = self.rng.choice(self._ctls)
        if self.site.ctld.running[name]:
            self.site.ctld.kill(name)
            self.site.at(self.rng.choice((0.5, 3.0, 12.0)), lambda: self.site.ctld.start(name))

    def _cut(self) -> None:
        a, b = self.rng.choice(self._ctls), self.site.victim()
        lasts = self.rng.uniform(0.5, 15.0)
        self.site.tell(f"link {a} {b} is cut for {lasts:.1f} s")
        self.site.world.network.cut(a, b, both=self.rng.random() < 0.6)
        self.site.at(lasts, lambda: self.site.world.network.mend(a, b))

    def _hang(self) -> None:
        name, lasts = self.site.victim(), self.rng.uniform(1.0, 25.0)
        self.site.hang(name, lasts)

    def _slurmd(self) -> None:
        name = self.site.victim()
        slurmd = self.site.slurmds[name]
        if slurmd.answers:
            self.site.tell(f"slurmd on {name} is killed")
            slurmd.process.kill()
            self.site.at(self.rng.uniform(0.5, 20.0), lambda: self.site.restart_slurmd(name))

    def _slow(self) -> None:
        name = self.rng.choice([*self._ctls, *self.site.nodes])
        much, lasts = self.rng.choice((0.05, 0.3, 1.0)), self.rng.uniform(1.0, 8.0)
        self.site.tell(f"{name} is slow by {much} s for {lasts:.1f} s")
        self.site.world.network.slow_s[name] = much

        def fast() -> None:
            self.site.world.network.slow_s.pop(name, None)

        self.site.at(lasts, fast)

    def _munge(self) -> None:
        name, lasts = self.rng.choice([*self._ctls, *self.site.nodes]), self.rng.uniform(0.5, 8.0)
        self.site.tell(f"munged on {name} does not answer for {lasts:.1f} s")
        self.site.world.munged.add(name)
        self.site.at(lasts, lambda: self.site.world.munged.discard(name))

    def _agent(self) -> None:
        name, within = self.site.victim(), self.rng.choice((0, 3, 30, 100))
        self.site.tell(f"agent on {name} dies within {within} turns")
        for number, training in self.site.trainings.items():
            if name in training.names:
                self.site.nodes[name].kill_agent(number, within)
                training.gone(name)
