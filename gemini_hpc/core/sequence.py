"""Places that distinguish the trainings of one name that a job runs one after the other.

A training is closed when all of its ranks have called `close()`. The next training of its name is a different one.
It is the next of its step (one process trains fold after fold), or the first of the next step (a loop in the batch
script). A step that is started again, by launcher, `gemini-hpc run` or requeue, has the places that it had.

The process counts K, the training of a step: one more for each `close()` of that name. All ranks compare K when they
join. If some have not closed, the next training runs unprotected from step 0, and a line names them.

S, the step, comes from the plan of the round, which lists the closed trainings. Each entry has its restart and its
*series*: the mark of `gemini-hpc run`, else job and step id without the launcher's attempt. The series is the same in
each start of the step. A step that is started again thus keeps its S, also where nobody has reported the restart.
After a requeue S begins anew: the first step gets its end and closes again, the second finds its place.

A training may be started whose version is gone. With a tier the agents then begin another round, which reads it. If
the tier has nothing, the launch ends. Its status is 0 if a later step has begun, and the training counts as closed
again; otherwise the status is 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec

from gemini_hpc.core.numbers import MAX_RANKS, PLACES, Count, Epoch, Restart, TrainingName, Version

MAX_KEPT = 256  # closed trainings remembered; the oldest is forgotten first and would then train once more

Series = Annotated[str, msgspec.Meta(max_length=64)]
Nth = Annotated[int, msgspec.Meta(ge=1, le=PLACES)]


class Place(NamedTuple):
    """The place of a training in the job's sequence.

    The place has the training's name, the step of the job, and the training of that step, both counted from 1.
    """

    name: str
    step: int = 1
    nth: int = 1

    @property
    def training_name(self) -> str:
        """Return the name for agents and tier. The first training has its name alone."""
        return self.name if self[1:] == (1, 1) else f"{self.name}+{self.step}.{self.nth}"

    @classmethod
    def parse(cls, training_name: str) -> Place:
        """Return the place of a training."""
        name, mark, place = training_name.partition("+")
        step, _, nth = place.partition(".")
        return cls(name, int(step), int(nth)) if mark else cls(name)


class Closed(msgspec.Struct, frozen=True):
    """A training that all ranks have closed.

    Attributes:
        training: Name of the training.
        version: Completed steps.
        restart: Incarnation in which it was last closed.
        series: The closing series, the same in each start of its step; "" if another job closed the training.
    """

    training: TrainingName
    version: Version
    restart: Restart
    series: Series = ""

    @property
    def _age(self) -> tuple[bool, int, int]:
        return bool(self.series), self.restart, self.version


class Closing(msgspec.Struct, frozen=True):
    """The ranks of one node that have closed a training of `world` ranks, all in one epoch."""

    training: TrainingName
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    ranks: tuple[Count, ...]
    version: Version
    restart: Restart
    series: Series
    epoch: Epoch


def merge_closed(known: Iterable[Closed], parts: Iterable[Closing] = ()) -> tuple[Closed, ...]:
    """Return all closed trainings that agents have reported, as a whole or for each of its own ranks."""
    newest: dict[str, Closed] = {}

    def keep_newest(closed: Closed) -> None:
        before = newest.get(closed.training)
        if before is None or before._age < closed._age:
            newest[closed.training] = closed

    for closed in known:
        keep_newest(closed)
    ranks: dict[tuple[str, int, int, str, int], set[int]] = defaultdict(set)
    versions: dict[tuple[str, int, int, str, int], int] = {}
    for part in parts:
        key = part.training, part.world, part.restart, part.series, part.epoch
        ranks[key].update(part.ranks)
        versions[key] = max(part.version, versions.get(key, 0))
    for key, found in ranks.items():
        name, world, restart, series, _ = key
        if found >= set(range(world)):
            keep_newest(Closed(name, versions[key], restart, series))
    return tuple(sorted(newest.values(), key=lambda closed: closed._age)[-MAX_KEPT:])


def is_passed(training_name: str, trainings: Iterable[str]) -> bool:
    """Return whether these trainings show that a later step has trained under this training's name."""
    place = Place.parse(training_name)
    return any(other.name == place.name and other.step > place.step for other in map(Place.parse, trainings))


def find_step(name: str, series: str, restart: int, closed: Iterable[Closed], held: Iterable[str]) -> int:
    """Return the number of a step among the steps of this incarnation that have closed trainings of this name.

    A step counts when it has closed all trainings that it had begun. Otherwise the next step is another start of it.
    `held` are the trainings that have a version to resume from.
    """
    closings = {
        c.training: c for c in closed if c.series and c.restart == restart and Place.parse(c.training).name == name
    }
    again = [Place.parse(c.training).step for c in closings.values() if c.series == series]
    if again:
        return max(again)
    last = max((Place.parse(c).step for c in closings), default=0)
    if last and any(Place.parse(h)[:2] == (name, last) and h not in closings for h in held):
        return last
    return min(last + 1, PLACES)
