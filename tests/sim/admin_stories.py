"""Stories of an administrator at work while a job loses a node and comes back."""

from __future__ import annotations

from collections.abc import Callable

from .admin import Admin
from .jobs import Wrong
from .many import all_trained, come_back, cut_one_of, end_after
from .site import Site

RECOVERY_S = 20.0  # from a power cut until the job runs again, and some more


def _during(site: Site, what: Callable[[], None]) -> None:
    """A node loses power; `what` comes at some moment of the recovery."""

    def cut() -> None:
        cut_one_of(site, site.training)
        site.at(site.rng.uniform(0.0, RECOVERY_S), what)

    all_trained(site, 5, cut)


def drained_dies(seed: int) -> Site:
    """A node that is drained loses power, and boots; the controller may die meanwhile. It stays drained."""
    site = Site(seed, auto_resume_s=5.0)
    admin = Admin(site)

    def drain() -> None:
        name = site.victim()
        admin.drain(name)
        site.at(site.rng.uniform(0.5, 15.0), lambda: cut(name))

    def cut(name: str) -> None:
        site.power_off(name)
        come_back(site, [site.training], lambda: None)
        if seed % 2:
            within = site.rng.choice((0, 1, 2, 5, 10, 30))
            site.at(site.rng.uniform(5.0, 9.0), lambda: site.controllers[0].kill(within))
        on = site.rng.uniform(6.0, 40.0)
        site.at(on, lambda: site.power_on(name))
        site.at(on + 60.0, lambda: site.last(12))

    all_trained(site, 5, drain)
    return site


def saver(seed: int) -> Site:
    """A survivor, or a spare, is drained in mid-recovery, and given back a while after."""
    site = Site(seed, nodes=6)
    admin = Admin(site)

    def drain() -> None:
        name = site.rng.choice([n for n in site.nodes if site.nodes[n].host.up])
        admin.drain(name)
        site.at(site.rng.uniform(5.0, 60.0), lambda: admin.resume(name))
        site.at(90.0, lambda: site.last(12))

    _during(site, drain)
    return site


def cancels(seed: int) -> Site:
    """The job is cancelled in mid-recovery: it stays so, and nothing is held for it."""
    site = Site(seed)
    admin = Admin(site)
    site.training.fails_after_s = (2.0, 12.0)
    _during(site, lambda: admin.cancel(site.training.number))
    return site


def holds(seed: int) -> Site:
    """The job is held in mid-recovery, and released a while after: it trains on."""
    site = Site(seed)
    admin, number = Admin(site), site.training.number

    def hold() -> None:
        if seed % 2:
            admin.requeue(number, hold=True)
        admin.hold(number)
        after_s = site.rng.choice((5.0, 60.0, 150.0))
        site.at(after_s, lambda: admin.release(number))
        end_after(site, after_s, 12)

    _during(site, hold)
    return site


def requeues(seed: int) -> Site:
    """The job is requeued by hand in mid-recovery, or when it has just come back."""
    site = Site(seed)
    admin, number = Admin(site), site.training.number

    def requeue() -> None:
        admin.requeue(number)
        end_after(site, 60.0, 12)

    _during(site, requeue)
    return site


def suspends(seed: int) -> Site:
    """The job is suspended, may lose a node meanwhile, and is resumed: a suspended job is not a dead one."""
    site = Site(seed)
    admin, number = Admin(site), site.training.number

    def suspend() -> None:
        admin.suspend(number)
        if seed % 2:
            name = site.victim()
            site.at(site.rng.uniform(0.0, 20.0), lambda: site.power_off(name))
        after_s = site.rng.uniform(20.0, 60.0)
        site.at(after_s, lambda: admin.go_on(number))
        end_after(site, after_s, 25)

    all_trained(site, 5, suspend)

    def check() -> None:
        if seed % 2 == 0 and (site.fenced or site.training.restart):
            raise Wrong(f"suspended: fenced {site.fenced}, restart {site.training.restart}")

    site.checks.append(check)
    return site


def downs(seed: int) -> Site:
    """A healthy node is set DOWN: the job goes back, and comes again with all that was sealed."""
    site = Site(seed)
    admin = Admin(site)

    def down() -> None:
        admin.down(site.victim())
        come_back(site, [site.training], lambda: site.last(12))

    all_trained(site, 5, down)
    return site


def reboots(seed: int) -> Site:
    """Nodes are to be rebooted, survivors too, as soon as they are idle: in a recovery, or before it."""
    site = Site(seed, nodes=6, replicas=3)
    admin = Admin(site)

    def reboot() -> None:
        for name in site.rng.sample(list(site.nodes), site.rng.randint(1, 2)):
            admin.reboot(name, asap=site.rng.random() < 0.5)
        site.at(60.0, admin.restore)
        end_after(site, 60.0, 12)

    _during(site, reboot)
    return site


def maintains(seed: int) -> Site:
    """Nodes are reserved for maintenance in mid-recovery, now or in a while."""
    site = Site(seed, nodes=6)
    admin = Admin(site)

    def maintain() -> None:
        names = site.rng.sample(list(site.nodes), site.rng.randint(1, 3))
        admin.maintain(names, after_s=site.rng.choice((0.0, 0.0, 30.0)), lasts_s=site.rng.uniform(20.0, 120.0))
        site.at(170.0, lambda: site.last(12))

    _during(site, maintain)
    return site


STORIES: dict[str, Callable[[int], Site]] = {
    "drained-dies": drained_dies,
    "drains": saver,
    "cancels": cancels,
    "holds": holds,
    "requeues": requeues,
    "suspends": suspends,
    "downs": downs,
    "reboots": reboots,
    "maintains": maintains,
}
