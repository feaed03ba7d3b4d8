"""Tell trainings of one name apart that a job runs one after the other: each has a place in the job's sequence.

A training is closed when all of its ranks have called `close()`. The next one of its name is another training: the
next of its step (one process trains fold after fold), or the first of the next step (the batch script has a loop). A
step that is started again, by launcher, `gemini-hpc run` or requeue, has the places that it had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec

from gemini_hpc.core.numbers import MAX_RANKS, PLACES, Count, Epoch, Restart, SetName, Version

MAX_KEPT = 256  # closed trainings that are remembered; then the oldest is forgotten, and would train once more

Series = Annotated[str, msgspec.Meta(max_length=64)]
Nth = Annotated[int, msgspec.Meta(ge=1, le=PLACES)]


class Place(NamedTuple):
    """The place of a training: its name, the step of the job, and the training of that step, both counted from 1."""

    name: str
    step: int = 1
    nth: int = 1

    @property
    def set_name(self) -> str:
        """Return the name for agents and tier: the first one has its name alone."""
        return self.name if self[1:] == (1, 1) else f"{self.name}+{self.step}.{self.nth}"

    @classmethod
    def of(cls, set_name: str) -> Place:
        """Return the place of a set."""
        name, mark, place = set_name.partition("+")
        step, _, nth = place.partition(".")
        return cls(name, int(step), int(nth)) if mark else cls(name)


class Closed(msgspec.Struct, frozen=True):
    """A training that all ranks have closed. series: what has closed it, the same in each start of its step; "": that
    was another job. restart: the incarnation of the last time. version: completed steps."""

    set: SetName
    version: Version
    restart: Restart
    series: Series = ""

    @property
    def _age(self) -> tuple[bool, int, int]:
        return bool(self.series), self.restart, self.version


class Closing(msgspec.Struct, frozen=True):
    """Ranks of one node that have closed a training of `world` ranks, all in one epoch."""

    set: SetName
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    ranks: tuple[Count, ...]
    version: Version
    restart: Restart
    series: Series
    epoch: Epoch


def merged(known: Iterable[Closed], parts: Iterable[Closing] = ()) -> tuple[Closed, ...]:
    """Return all closed trainings that agents have reported, as a whole or each of its own ranks."""
    newest: dict[str, Closed] = {}

    def take(closed: Closed) -> None:
        before = newest.get(closed.set)
        if before is None or before._age < closed._age:
            newest[closed.set] = closed

    for closed in known:
        take(closed)
    ranks: dict[tuple[str, int, int, str, int], set[int]] = defaultdict(set)
    versions: dict[tuple[str, int, int, str, int], int] = {}
    for part in parts:
        key = part.set, part.world, part.restart, part.series, part.epoch
        ranks[key].update(part.ranks)
        versions[key] = max(part.version, versions.get(key, 0))
    for key, found in ranks.items():
        name, world, restart, series, _ = key
        if found >= set(range(world)):
            take(Closed(name, versions[key], restart, series))
    return tuple(sorted(newest.values(), key=lambda closed: closed._age)[-MAX_KEPT:])


def passed(set_name: str, sets: Iterable[str]) -> bool:
    """Return whether these sets show that a later step has trained under this training's name."""
    place = Place.of(set_name)
    return any(other.name == place.name and other.step > place.step for other in map(Place.of, sets))


def step_of(name: str, series: str, restart: int, closed: Iterable[Closed], held: Iterable[str]) -> int:
    """Return the number of a step among those of this incarnation that have closed trainings of this name. held: sets
    that have a version to resume from.

    A step counts when it has closed all that it had begun. Else the next one is taken for another start of it.
    """
    mine = {c.set: c for c in closed if c.series and c.restart == restart and Place.of(c.set).name == name}
    again = [Place.of(c.set).step for c in mine.values() if c.series == series]
    if again:
        return max(again)
    last = max((Place.of(c).step for c in mine), default=0)
    if last and any(Place.of(h)[:2] == (name, last) and h not in mine for h in held):
        return last
    return min(last + 1, PLACES)
