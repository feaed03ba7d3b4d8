"""Which rank of an attempt failed first, and on which node ranks do so again and again: pure rules.

All ranks of an attempt end within moments: one fails, collectives of the others break, launchers kill who is left. No
clock of several nodes orders these ends. What each of them shows does: a rank that its launcher killed had no part
in it; an error of a collective is what a peer's end looks like; what is left has failed by itself. Where ranks of
several nodes have, in the same way, the program is the cause and no node is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

SICK = 2  # so often ranks of one node have failed first
MOST_HOSTS, MOST_KEYS = 1024, 16


class Cause(IntEnum):
    """What the end of a rank shows, the weakest first."""

    CONSEQUENCE = 0  # an error of a collective, or a signal that somebody sent: not by itself
    ABORTED = 1  # SIGABRT: of the program, or of a watchdog of its collectives
    RAISED = 2  # another exception, another status than 0
    CRASHED = 3  # SIGSEGV, SIGBUS, a SIGKILL that was not its launcher's (out of memory, say)
    HUNG = 4  # the others waited for it


@dataclass(frozen=True, slots=True, order=True)
class Failure:
    """The end of one rank."""

    cause: Cause
    host: str
    rank: int


@dataclass(frozen=True, slots=True)
class Ends:
    """How ranks of one attempt have ended, as far as that decides: for each cause the lowest ranks on two hosts.
    In whatever order they are heard, and however often, the same is known (a join)."""

    found: frozenset[Failure] = frozenset()

    def join(self, more: Iterable[Failure]) -> Ends:
        """With these, too."""
        kept: dict[Cause, dict[str, Failure]] = {}
        for failure in sorted(self.found.union(more), key=lambda f: (f.cause, f.host, f.rank)):
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


class Tally:
    """In which attempts of one job a node's ranks failed first; bounded: what was blamed first is forgotten first."""

    def __init__(self) -> None:
        self._by_host: dict[str, dict[Key, None]] = {}

    def blame(self, host: str, key: Key) -> bool:
        """A rank of this node failed first in this attempt; False: that is known."""
        keys = self._by_host.pop(host, {})
        known = key in keys
        keys[key] = None
        while len(keys) > MOST_KEYS:
            del keys[next(iter(keys))]
        self._by_host[host] = keys
        while len(self._by_host) > MOST_HOSTS:
            del self._by_host[next(iter(self._by_host))]
        return not known

    def count(self, host: str) -> int:
        """How often."""
        return len(self._by_host.get(host, ()))


def told(cause: Cause) -> str:
    """What a rank did, in words."""
    return {
        Cause.CONSEQUENCE: "failed of another one",
        Cause.ABORTED: "aborted",
        Cause.RAISED: "ended with an error",
        Cause.CRASHED: "was killed or crashed",
        Cause.HUNG: "kept the others waiting",
    }[cause]
