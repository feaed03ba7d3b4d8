"""Random runs of `World`, from a seed: faults and events in random order, then peace and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from commit_world import Violation, World


def run(
    seed: int, *, weak: Iterable[str] = (), length: int = 400, make: Callable[..., World] = World, cuts: float = 0.0
) -> World:
    """One run. cuts: of the faults, how many take all nodes at once. Raises Violation."""
    random = Random(seed)
    N = random.choice([2, 2, 3, 3, 4, 5])
    m = random.choice([2, 2, min(3, N)])
    world = make(N, m, random.choice([1, 1, 2]), patience=random.choice([0, 0, 2, 3]), weak=weak)
    brisk, pace = True, random.choice([1.0, 0.5, 0.1])
    fault_every = random.choice([15, 40, 120])
    if random.random() < 0.8:
        world.settle(random.randrange(1, 9))
    for _ in range(length):
        if world.phase == "down" and random.random() < 0.2:
            recover(world, random)
        elif random.random() * fault_every < 1:
            fault(world, random) if not cuts or random.random() > cuts else power_cut(world)
        elif random.random() < 0.02:
            world.settle(1)
        else:
            events = [event for event in world.events() if brisk or not event[0].endswith("acknowledges")]
            if events:
                random.choice(events)[1]()
            elif world.phase == "voiding":
                world.acknowledge(min(world.unacknowledged))
            brisk = random.random() < pace
    progress(world, random)
    return world


FAULTS = ["crash", "crash", "suspect", "alarm", "software", "agent", "lose", "double", "copy", "copy"]


def recover(world: World, random: Random) -> None:
    back = [host for host in sorted(world.away) if random.random() < 0.5]
    world.recover(lambda hosts: random.sample(hosts, len(hosts)), back)


def fault(world: World, random: Random) -> None:
    kind = random.choice(
        ["crash", "crash", "suspect", "alarm", "software", "agent", "lose", "double", "copy", "copy"]
    )
    host = random.choice(world.hosts)
    if kind in ("crash", "suspect"):
        if world.reachable(host) and (world.allowed(host) or random.random() < 0.03):
            world.crash(host) if kind == "crash" else world.suspect(host)
    elif kind == "software":
        world.kill_trainers()
    elif kind == "alarm":
        world.alarm()
    elif kind == "agent":
        if host in world.agents:
            world.crash_agent(host)
    elif kind == "copy":
        if world.trainers:
            trainer = random.choice(list(world.trainers.values()))
            world.delay_copy(trainer, random.choice(list(world.keepers(trainer.rank))))
    elif world.net:
        message = random.choice(world.net)
        world.lose(message) if kind == "lose" else world.deliver(message, keep=True)


def power_cut(world: World) -> None:
    for host in list(world.hosts):
        if world.reachable(host):
            world.crash(host)


def progress(world: World, random: Random) -> None:
    """Without further faults, training goes on and versions are sealed."""
    for _ in range(4):
        if world.phase == "down":
            recover(world, random)
        world.settle(3)
    before = world.guaranteed
    world.settle(12)
    if world.phase != "running" or world.guaranteed is None or world.guaranteed == before:
        raise Violation(f"no progress: {world.phase}, sealed {before} and {world.guaranteed}")
