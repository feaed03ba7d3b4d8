"""The nodes of a job that have not died: which of them can be pinned now.

A pin on a node that does not answer makes the job hang; on one that Slurm would not allocate (drained, in another's
reservation, ...) it makes the job wait although others are idle. Such a node is left out, its copies are pulled from
it, and it is taken in again when that is over. Nothing is done to a node here: that is `fencing`'s to judge.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gemini_hpc import clock
from gemini_hpc.controller import probe
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.probe import Seen, Target
from gemini_hpc.controller.requeue_rules import barred
from gemini_hpc.controller.reservation import Say
from gemini_hpc.slurm.facts import Job, Node, Reservation

Fence = Callable[[str, Seen], Awaitable[bool]]


@dataclass
class Survivors:
    """Of one recovery. `target`: where a node is probed. `vouched`: whether an agent there has just spoken. `fence`:
    judges a silent one and fences it if that follows; true if the node is dead then."""

    names: list[str]
    say: Say
    target: Callable[[Node], Target]
    vouched: Callable[[str], bool]
    confirm_s: float
    fence: Fence | None = None
    dead: list[str] = field(default_factory=list)
    surveyed: bool = False
    _seen: dict[str, Seen] = field(default_factory=dict)
    _fine: set[str] = field(default_factory=set)
    _barred: dict[str, str] = field(default_factory=dict)
    _told: dict[str, str] = field(default_factory=dict)

    def bar(
        self,
        job: Job,
        nodes: Mapping[str, Node],
        partitions: Mapping[str, str],
        reservations: Iterable[Reservation],
        length_s: float,
    ) -> None:
        """Take over what Slurm says. `reservations`: those that are not the job's; `length_s`: the job's time."""
        others, ends_at = list(reservations), clock.time() + length_s
        known = {n: barred(job, nodes[n], partitions, others, ends_at) for n in self.names if n in nodes}
        self._barred = {n: why for n, why in known.items() if why}

    async def look(self, nodes: Mapping[str, Node]) -> None:
        """Probe those for which no agent vouches, once; those that have been silent are put to the judgement."""
        began = clock.monotonic()
        targets: dict[str, Target] = {}
        for name in self.names:
            if self.vouched(name):
                self._fine.add(name)
                self._seen.pop(name, None)
            elif name in nodes:
                targets[name] = self.target(nodes[name])
        for name, found in (await probe.looks(targets)).items():
            self._seen.setdefault(name, Seen(self.confirm_s)).add(found, began)
            if found.slurmd is Port.ANSWERS:
                self._fine.add(name)
        self.surveyed = True
        for name, seen in list(self._seen.items()):
            if name not in self.names or seen.silent_s < self.confirm_s or self.fence is None:
                continue
            if await self.fence(name, seen):
                self.names.remove(name)
                self.dead.append(name)
                self._seen.pop(name)

    def left_out(self, *, patient: bool) -> dict[str, str]:
        """Which must not be pinned now, and why. patient: some silence of one that has answered is forgiven."""
        out = dict(self._barred)
        for name, seen in self._seen.items():
            patience_s = self.confirm_s if patient and name in self._fine else 0.0
            if name in self.names and seen.slurmd_silent_s > patience_s:
                out.setdefault(name, "no answer from slurmd")
        return {n: why for n, why in out.items() if n in self.names}

    def pinnable(self, *, patient: bool) -> tuple[str, ...]:
        """Those that a pin may name; what has changed is told."""
        out = self.left_out(patient=patient)
        for name in self.names:
            why, told = out.get(name, ""), self._told.get(name, "")
            if why and not told:
                self.say("survivor_left_out", name, why)
            elif told and not why:
                self.say("survivor_back", name, "")
            self._told[name] = why
        return tuple(n for n in self.names if n not in out)
