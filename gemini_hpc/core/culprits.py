"""Which rank of an attempt failed first, and on which node ranks do so again and again: pure rules.

All ranks of an attempt end within moments: one fails, collectives of the others break, launchers kill who is left. No
clock of several nodes orders these ends. What each of them shows does: a rank that its launcher killed had no part
in it; an error of a collective is what a peer's end looks like; what is left has failed by itself. Where ranks of
several nodes have, in the same way, the program is the cause and no node is.

A node is sick when its ranks have failed first twice, in a way that a healthy node would not show: see `Tally`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

SICK = 2  # so often ranks of one node have failed first
MOST_HOSTS, MOST_KEYS = 1024, 16
_SAME_STEP = 1  # failures that lie so many steps apart are at the same step


class Cause(IntEnum):
    """What the end of a rank shows, the weakest first."""

    CONSEQUENCE = 0  # an error of a collective, or a signal that somebody sent: not by itself
    ABORTED = 1  # SIGABRT: of the program, or of a watchdog of its collectives
    RAISED = 2  # another exception, another status than 0, or more memory than its limit
    CRASHED = 3  # SIGSEGV, SIGBUS, a SIGKILL that was not its launcher's
    HUNG = 4  # the others waited for it
    DEVICE = 5  # an exception of the accelerator, or of the bus


@dataclass(frozen=True, slots=True, order=True)
class Failure:
    """The end of one rank. version: the newest that its attempt had begun to save, 0 before the first."""

    cause: Cause
    host: str
    rank: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Ends:
    """How ranks of one attempt have ended, as far as that decides: for each cause the lowest ranks on two hosts.
    In whatever order they are heard, and however often, the same is known (a join)."""

    found: frozenset[Failure] = frozenset()

    def join(self, more: Iterable[Failure]) -> Ends:
        """With these, too."""
        kept: dict[Cause, dict[str, Failure]] = {}
        for failure in sorted(self.found.union(more), key=lambda f: (f.cause, f.host, f.rank, f.version)):
            hosts = kept.setdefault(failure.cause, {})
            if failure.host not in hosts and len(hosts) < 2:
                hosts[failure.host] = failure
        return Ends(frozenset(failure for hosts in kept.values() for failure in hosts.values()))

    @property
    def first(self) -> Failure | None:
        """The rank that failed first; None: all have failed of another one, or several nodes' by themselves."""
        worst = max((failure.cause for failure in self.found), default=Cause.CONSEQUENCE)
        chosen = [failure for failure in self.found if failure.cause is worst]
        return chosen[0] if len(chosen) == 1 and worst is not Cause.CONSEQUENCE else None


Key = tuple[int, str, int]  # incarnation, step, attempt


class Blame(NamedTuple):
    """A rank that failed first in one attempt. step: steps that the attempt had begun to save, 0 before the first."""

    rank: int
    cause: Cause
    step: int

    @property
    def counts(self) -> bool:
        """Return whether the node may be the cause. Exceptions, and crashes before any step, are the program's."""
        if self.cause in (Cause.CONSEQUENCE, Cause.RAISED):
            return False
        return self.step > 0 or self.cause is Cause.DEVICE


class Tally:
    """The blames of one job's nodes, by attempt; bounded: the node blamed longest ago is forgotten first.

    Failures at the same step count once: the program comes back to what it cannot do. A rank that fails first on
    several nodes takes its cause along, so it speaks against none of them.
    """

    def __init__(self) -> None:
        self._by_host: dict[str, dict[Key, Blame]] = {}

    def blame(self, host: str, key: Key, blame: Blame) -> bool:
        """Record that a rank of this node failed first in this attempt; return False where that is known."""
        blames = self._by_host.pop(host, {})
        is_new = key not in blames
        blames.setdefault(key, blame)
        while len(blames) > MOST_KEYS:
            del blames[next(iter(blames))]
        self._by_host[host] = blames
        while len(self._by_host) > MOST_HOSTS:
            del self._by_host[next(iter(self._by_host))]
        return is_new

    def count(self, host: str) -> int:
        """Return at how many steps ranks of this node failed first in a way that counts."""
        elsewhere = {b.rank for name, blames in self._by_host.items() if name != host for b in blames.values()}
        steps = sorted(b.step for b in self._by_host.get(host, {}).values() if b.counts and b.rank not in elsewhere)
        count, last = 0, -_SAME_STEP - 1
        for step in steps:
            if step - last > _SAME_STEP:
                count, last = count + 1, step
        return count

    def sick(self) -> list[str]:
        """Return the sick nodes, sorted."""
        return sorted(host for host in self._by_host if self.count(host) >= SICK)


def told(cause: Cause) -> str:
    """What a rank did, in words."""
    return {
        Cause.CONSEQUENCE: "failed of another one",
        Cause.ABORTED: "aborted",
        Cause.RAISED: "ended with an error",
        Cause.CRASHED: "was killed or crashed",
        Cause.HUNG: "kept the others waiting",
        Cause.DEVICE: "had an error of its device",
    }[cause]
