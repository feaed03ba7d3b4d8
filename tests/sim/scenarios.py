"""What happens to a simulated site, by name: `python -m tests.sim.scenarios NAME --seed 3` tells a story."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial

import msgspec

from gemini_hpc.controller import withheld

from . import admin_stories, many, mix
from .apart import Told, apart, with_equal_hashes
from .chaos import Chaos
from .jobs import Wrong
from .kernel import Killed
from .site import Site
from .system import story

BACK_S = 26.0  # from a power cut to the script that runs again: 2 s, 5 s, and what Slurm takes, up to 10 s


def success(seed: int) -> Site:
    """A job runs to its end."""
    site = Site(seed)
    site.training.steps = 15

    def check() -> None:
        if site.fenced or site.hit or site.training.restart:
            raise Wrong(f"nothing had happened: fenced {site.fenced}, restart {site.training.restart}")

    site.checks.append(check)
    return site


def _loses_power(site: Site, also: Callable[[], None] = lambda: None, *, kept: bool = True) -> None:
    """A node of the training's loses power; the job comes back on the others (kept) and a spare, and trains on."""
    site.when_trained(5, lambda: _cut(site, also, kept=kept))


def _cut(site: Site, also: Callable[[], None], *, kept: bool = True) -> None:
    name, nodes, began = site.victim(), set(site.training.names), site.world.loop.now
    site.power_off(name)
    also()

    def again() -> None:
        if site.training.restart == 0 or site.training.state != "running":
            site.at(1.0, again)
            return
        site.back_s = site.world.loop.now - began
        site.last(12)

    site.at(1.0, again)

    def check() -> None:
        if site.training.restart < 1:
            raise Wrong("the job was not requeued")
        if kept and not nodes - {name} <= set(site.training.names):
            raise Wrong(f"survivors {sorted(nodes - {name})} of which only some of {site.training.names} were used")

    site.checks.append(check)


def power(seed: int) -> Site:
    """A node loses power: it is fenced, and the job is back within seconds."""
    site = Site(seed)
    _loses_power(site)

    def check() -> None:
        if len(site.fenced) != 1 or site.training.restart != 1:
            raise Wrong(f"fenced {site.fenced}, restart {site.training.restart}")
        if site.back_s > BACK_S:
            raise Wrong(f"the job was back after {site.back_s:.0f} s")

    site.checks.append(check)
    return site


def canary(seed: int) -> Site:
    """The same where the job's partition is a canary: the agents are told, and the controller acts as ever."""
    site = Site(seed, mode="canary")
    _loses_power(site)

    def check() -> None:
        if len(site.fenced) != 1 or site.training.restart != 1:
            raise Wrong(f"fenced {site.fenced}, restart {site.training.restart}")

    site.checks.append(check)
    return site


def observes(seed: int) -> Site:
    """A node loses power at a site that only observes: Slurm finds it, and its own judgement confirms ours."""
    site = Site(seed, mode="observe")
    site.training.fails_after_s = None  # nobody would send such a job back
    _loses_power(site, kept=False)

    def check() -> None:
        with open(f"{site.place}/state/{withheld.FILE}", "rb") as f:
            acts = msgspec.json.decode(f.read(), type=list[withheld.WithheldAct])
        if [(a.act, a.job, a.verdict) for a in acts] != [(withheld.FENCE, site.training.number, withheld.CONFIRMED)]:
            raise Wrong(f"the score is {acts}")

    site.checks.append(check)
    return site


def ends_early(seed: int) -> Site:
    """The script ends by itself, without success, before any agent has noticed that a node is lost."""
    site = Site(seed)
    site.training.fails_after_s = (0.0, 1.5)
    _loses_power(site)
    return site


def ends_well(seed: int) -> Site:
    """The same, and the script ends with 0: the job is COMPLETED, and comes back all the same, once."""
    site = ends_early(seed)
    site.training.ends_with = 0
    site.checks.append(lambda: _requeued_once(site))
    return site


def _requeued_once(site: Site) -> None:
    if site.training.restart != 1:
        raise Wrong(f"restart {site.training.restart}")


def no_kill(seed: int) -> Site:
    """--no-kill: Slurm takes the dead node from the job and ends its step, and the script ends with 0. In half of the
    seeds Slurm is faster than the agents."""
    site = Site(seed)
    site.training.ends_with, site.training.fails_after_s = 0, None
    site.ctld.state.jobs[site.training.number].no_kill = True

    def also() -> None:
        (name,) = (name for name in site.training.names if not site.nodes[name].host.up)
        site.at(site.rng.uniform(0.05, 1.0), lambda: site.ctld.set_down(name))

    _loses_power(site, also if seed % 2 else lambda: None)
    site.checks.append(lambda: _requeued_once(site))
    return site


def fails(seed: int) -> Site:
    """The script fails for a reason of its own: it stays so, no node is suspected, and all is freed."""
    site = Site(seed)
    site.ended_by_admin.add(site.training.number)
    site.when_trained(5, lambda: site.training._fails(0))

    def check() -> None:
        told = [text for _, text in site.world.story if " detected v" in text]
        if site.fenced or site.training.restart or told:
            raise Wrong(f"nothing had happened: fenced {site.fenced}, restart {site.training.restart}, {told}")

    site.checks.append(check)
    return site


def controller_killed(seed: int) -> Site:
    """The same, and the controller dies at some moment of the recovery, perhaps more than once."""
    site = Site(seed)

    def also() -> None:
        for _ in range(site.rng.choice((1, 1, 2, 3))):
            within = site.rng.choice((0, 1, 2, 5, 10, 30, 100))
            site.at(site.rng.uniform(0.0, 16.0), lambda within=within: site.controllers[0].kill(within))  # type: ignore[misc]

    _loses_power(site, also)
    return site


def slurmctld_killed(seed: int) -> Site:
    """The same, and slurmctld is killed and comes back."""
    site = Site(seed)

    def also() -> None:
        at = site.rng.uniform(0.0, 14.0)
        site.at(at, lambda: site.ctld.kill("ctl"))
        site.at(at + site.rng.choice((0.5, 2.0, 8.0, 15.0)), lambda: site.ctld.start("ctl"))

    _loses_power(site, also)
    return site


def busy(seed: int) -> Site:
    """All other nodes are busy, and others' jobs wait."""
    site = Site(seed, nodes=6, fillers=16)
    site.training.fails_after_s = None  # the nodes of one that ends early are soon another job's
    _loses_power(site)
    return site


def hangs(seed: int) -> Site:
    """All processes of a node stop for a while: its kernel lives, so it is never fenced."""
    site = Site(seed)

    def stop() -> None:
        site.hang(site.victim(), site.rng.uniform(8.0, 25.0), lambda: site.at(20.0, lambda: site.last(5)))

    site.when_trained(5, stop)
    site.checks.append(lambda: _nobody_fenced(site))
    return site


def cut_off(seed: int) -> Site:
    """A node is cut off from the controller's host, not from its peers."""
    site = Site(seed)

    def cut() -> None:
        name, lasts = site.victim(), site.rng.uniform(10.0, 40.0)
        site.tell(f"{name} is cut off from ctl for {lasts:.0f} s")
        site.world.network.cut("ctl", name, both=site.rng.random() < 0.7)

        def mend() -> None:
            site.world.network.mend("ctl", name)
            site.at(5.0, lambda: site.last(5))

        site.at(lasts, mend)

    site.when_trained(5, cut)
    site.checks.append(lambda: _nobody_fenced(site))
    return site


def survivor_cut(seed: int) -> Site:
    """A survivor is cut off from the controller's host, not from its peers, while the job is on its way back."""
    site = Site(seed, nodes=6)

    def cut() -> None:
        name = site.rng.choice([n for n in site.training.names if site.nodes[n].host.up])
        lasts = site.rng.uniform(8.0, 40.0)
        site.tell(f"{name} is cut off from ctl for {lasts:.0f} s")
        site.world.network.cut("ctl", name)
        site.at(lasts, lambda: site.world.network.mend("ctl", name))

    def also() -> None:
        site.at(site.rng.uniform(0.5, 14.0), cut)

    _loses_power(site, also, kept=False)

    def check() -> None:
        if len(site.fenced) != 1:
            raise Wrong(f"fenced {site.fenced}")

    site.checks.append(check)
    return site


def hung_and_cut(seed: int) -> Site:
    """Two nodes hang. One goes on, and is then cut off from the controller's host: what its peers had said of it is
    over, though the recovery is still on for the other one."""
    site = Site(seed, size=4)

    def stop() -> None:
        other, name = site.rng.sample(site.training.names, 2)
        later = site.rng.choice((0.5, 2.0, 12.0, 30.0))
        site.hang(other, 55.0, lambda: site.at(5.0, lambda: site.last(5)))
        site.hang(name, site.rng.uniform(4.0, 12.0), lambda: site.at(later, lambda: cut(name)))

    def cut(name: str) -> None:
        site.tell(f"{name} is cut off from ctl")
        site.world.network.cut("ctl", name)
        site.at(15.0, lambda: site.world.network.mend("ctl", name))

    site.when_trained(5, stop)
    site.checks.append(lambda: _nobody_fenced(site))
    return site


def _nobody_fenced(site: Site) -> None:
    if site.fenced:
        raise Wrong(f"fenced: {site.fenced}")


def backup(seed: int) -> Site:
    """slurmctld's host loses power during a recovery; its backup, and the controller there, take over."""
    site = Site(seed, backup=True)

    def also() -> None:
        site.at(site.rng.uniform(0.0, 14.0), off)

    def off() -> None:
        site.tell("the primary's host loses power")
        site.controllers[0].restarts = False
        if (process := site.controllers[0].process) is not None:
            process.kill()
        site.world.network.power_off(site.hosts[0])

    _loses_power(site, also)
    return site


def no_controller(seed: int) -> Site:
    """No controller anywhere: Slurm finds the dead node by itself, and a survivor's epilog holds the others."""
    site = Site(seed, nodes=6, fillers=14 if seed % 2 else 0)
    site.training.fails_after_s = None  # nobody would send such a job back
    site.forgetful = True

    def also() -> None:
        site.controllers[0].restarts = False
        site.controllers[0].kill(0)

    site.when_trained(3, also)
    # One survivor's epilog holds all, and another's may end before: on a busy site its node is stolen then.
    site.when_trained(5, lambda: _cut(site, lambda: None, kept=seed % 2 == 0))
    return site


def reboot(seed: int) -> Site:
    """A node loses power and boots within seconds."""
    site = Site(seed)

    def cut() -> None:
        name = site.victim()
        site.power_off(name)
        site.at(site.rng.choice((0.5, 1.5, 4.0, 8.0)), lambda: site.power_on(name))
        site.at(60.0, lambda: site.last(12))

    site.when_trained(5, cut)
    return site


def second(seed: int) -> Site:
    """A survivor loses power while the job is on its way back."""
    site = Site(seed, nodes=7, size=4, replicas=3)

    def also() -> None:
        site.at(site.rng.uniform(0.5, 14.0), again)

    def again() -> None:
        up = [name for name in site.training.names if site.nodes[name].host.up]
        site.power_off(site.rng.choice(up))

    _loses_power(site, also, kept=False)
    return site


def outage(seed: int) -> Site:
    """More nodes than may be fenced lose power at once: all are left to Slurm, and come back."""
    site = Site(seed, nodes=7, size=5, replicas=3)

    def cut() -> None:
        for name in site.rng.sample(site.training.names, 3):
            site.at(site.rng.uniform(0.0, 1.0), lambda name=name: site.power_off(name))  # type: ignore[misc]
            site.at(site.rng.uniform(70.0, 80.0), lambda name=name: site.power_on(name))  # type: ignore[misc]
        site.at(100.0, lambda: site.last(12))

    site.when_trained(5, cut)
    site.checks.append(lambda: _nobody_fenced(site))
    return site


def chaos(seed: int) -> Site:
    """Anything, for half a minute; then all is mended, and the training has to come to its end."""
    rng = random.Random(seed)
    site = Site(
        seed,
        nodes=rng.randint(5, 8),
        size=rng.randint(2, 4),
        fillers=rng.choice((0, 0, 10, 20)),
        backup=rng.random() < 0.3,
        settle_s=rng.choice((5.0, 15.0)),
    )
    Chaos(site).plan()
    return site


SCENARIOS: dict[str, Callable[[int], Site]] = {
    "success": success,
    "power": power,
    "canary": canary,
    "observes": observes,
    "ends-early": ends_early,
    "ends-well": ends_well,
    "no-kill": no_kill,
    "fails": fails,
    "controller-killed": controller_killed,
    "slurmctld-killed": slurmctld_killed,
    "busy": busy,
    "hangs": hangs,
    "cut-off": cut_off,
    "survivor-cut": survivor_cut,
    "hung-and-cut": hung_and_cut,
    "backup": backup,
    "no-controller": no_controller,
    "reboot": reboot,
    "second": second,
    "outage": outage,
    "chaos": chaos,
    "mix": mix.mix,
    **many.STORIES,
    **admin_stories.STORIES,
}


def tell(name: str, seed: int, broken: Callable[[], None] = lambda: None) -> Told:
    """Return (what went wrong or "", the story). Only once in a process. broken: breaks the code on purpose."""
    broken()
    site = SCENARIOS[name](seed)
    try:
        site.run()
    except (Exception, Killed) as error:
        return f"{type(error).__name__}: {error}", story(site.world)
    return "", story(site.world)


def main() -> int:
    """The exit status: 0 where no seed has found anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.scenarios", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*SCENARIOS, "all"])
    parser.add_argument("--seed", type=int, help="this one only; print its story")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    with_equal_hashes("tests.sim.scenarios")
    names = list(SCENARIOS) if "all" in args.names else args.names
    if args.seed is not None:
        ended = apart(partial(tell, names[0], args.seed))
        print(ended.story)
        print(f"{names[0]} seed {args.seed}: {ended.problem or 'nothing wrong'}")
        return 1 if ended.problem else 0
    wrong = 0
    for name in names:
        cpu_s = 0.0
        for seed in range(args.first, args.first + args.seeds):
            ended = apart(partial(tell, name, seed))
            cpu_s += ended.cpu_s
            if ended.problem:
                wrong += 1
                print(f"{name} seed {seed}: {ended.problem[:400]}", flush=True)
        print(f"{name}: {args.seeds} seeds in {cpu_s:.1f} CPU s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
