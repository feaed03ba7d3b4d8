"""Stories of several protected jobs on one site, of one owner or of several."""

from __future__ import annotations

from collections.abc import Callable

from .jobs import Wrong
from .site import FILLER, OTHER, Site
from .system import OWNER
from .training import Training

THIRD = 3000


def all_trained(site: Site, version: int, what: Callable[[], None]) -> None:
    """As soon as all trainings run and have sealed so many steps; once."""

    def look() -> None:
        if all(t.state == "running" and t.sealed >= version for t in site.trainings.values()):
            what()
        else:
            site.at(0.25, look)

    site.at(1.0, look)


def come_back(site: Site, trainings: list[Training], what: Callable[[], None]) -> None:
    """As soon as all of these run again, later than now; once."""
    before = [(t, t.restart) for t in trainings]

    def look() -> None:
        if all(t.restart > restart and t.state == "running" for t, restart in before):
            what()
        else:
            site.at(0.5, look)

    site.at(1.0, look)


def end_after(site: Site, after_s: float, more: int) -> None:
    """The trainings end so much later, after so many more steps."""
    site.at(after_s, lambda: site.last(more))


def cut_one_of(site: Site, training: Training) -> str:
    """One node of this job's loses power; which."""
    name = site.rng.choice([n for n in training.names if site.nodes[n].host.up])
    site.power_off(name)
    return name


def _cut(site: Site, training: Training) -> None:
    cut_one_of(site, training)


def _untouched(site: Site, training: Training) -> None:
    if training.restart or training.number in site.hit:
        raise Wrong(f"neighbour: job {training.number} has lost no node, and is at restart {training.restart}")


def _kept(training: Training, nodes: set[str]) -> None:
    if not nodes <= set(training.names):
        raise Wrong(f"survivors {sorted(nodes)} of which only some of {training.names} were used")


def neighbours(seed: int) -> Site:
    """A job loses a node beside another owner's: that one is not disturbed, though jobs wait for every node."""
    site = Site(seed, nodes=8, fillers=10 if seed % 2 else 0)
    other = site.add(OTHER, 3, priority=10)

    def cut() -> None:
        lost = cut_one_of(site, site.training)
        left = set(site.training.names) - {lost}
        come_back(site, [site.training], lambda: site.last(12))
        site.checks.append(lambda: _kept(site.training, left))

    all_trained(site, 50, cut)
    site.checks.append(lambda: _untouched(site, other))
    return site


def both(seed: int) -> Site:
    """Two jobs lose a node each, at about one time; another job waits for as many nodes as there are spares."""
    site = Site(seed, nodes=9)
    other = site.add(OWNER if seed % 2 else OTHER, 3)
    for training in site.trainings.values():
        training.fails_after_s = None  # the nodes of one that ends early are soon another job's

    def cut() -> None:
        site.ctld.submit(FILLER, THIRD, 3, priority=20, runs_s=site.rng.uniform(20.0, 60.0))
        for training in site.trainings.values():
            site.at(site.rng.choice((0.0, 2.0, 8.0)), lambda t=training: once(t))  # type: ignore[misc]
        come_back(site, [site.training, other], lambda: site.last(12))

    def once(training: Training) -> None:
        lost = cut_one_of(site, training)
        left = set(training.names) - {lost}
        site.checks.append(lambda: _kept(training, left))

    all_trained(site, 5, cut)
    return site


def budgets(seed: int) -> Site:
    """Three jobs lose a node each, one after the other, on a budget of two, one for each user: what is beyond is left
    to Slurm, and all come back."""
    site = Site(seed, nodes=9, size=2, user_budget=1)
    site.add(OTHER, 2)
    site.add(OWNER if seed % 2 else THIRD, 2)
    apart_s = 25.0

    def cut() -> None:
        order = list(site.trainings.values())
        site.rng.shuffle(order)
        if seed % 4 == 1:  # both of one owner first
            order.sort(key=lambda t: t.user_id)
        for i, training in enumerate(order):
            site.at(i * apart_s, lambda t=training: _cut(site, t))  # type: ignore[misc]
        come_back(site, order, lambda: site.last(12))

    all_trained(site, 5, cut)

    def check() -> None:
        # What waits for its budget is silent, and counts as well: so it may be one.
        if not 1 <= len({name for _, name in site.fenced}) <= 2:
            raise Wrong(f"fenced: {site.fenced}, of three, with a budget of two")

    site.checks.append(check)
    return site


def waits(seed: int) -> Site:
    """A protected job waits for the nodes of another one, which loses a node: it gets none of the survivors."""
    site = Site(seed, nodes=5)
    began = site.training

    def look() -> None:
        if began.sealed < 5:
            site.at(0.25, look)
            return
        site.add(OTHER, 3, priority=50)
        lost = cut_one_of(site, began)
        left = set(began.names) - {lost}

        def back() -> None:
            _kept(began, left)
            site.last(12)

        come_back(site, [began], back)

    site.at(1.0, look)
    return site


STORIES: dict[str, Callable[[int], Site]] = {
    "neighbours": neighbours,
    "both": both,
    "budgets": budgets,
    "waits": waits,
}
