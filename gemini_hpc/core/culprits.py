"""Pure rules that find the rank that failed first, and the nodes whose ranks repeatedly fail first.

All ranks of an attempt end within moments: one fails, the collectives of the others break, and launchers kill the
rest. Clocks of several nodes cannot order these ends, but the sign of each end can. A rank that its launcher killed
had no part in the failure. An error of a collective is the consequence of a peer's end. A rank with any other end
has failed by itself. If ranks of several nodes fail in the same way, the program is the cause and no node is.

A rank notes an exception before any handler can wait. Its launcher therefore knows of the exception when it kills
the rank.

A node is sick if its ranks failed first twice, in a way that a healthy node would not show (see `Tally`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

SICK = 2  # first failures of one node's ranks after which the node is sick
MOST_HOSTS, MOST_KEYS = 1024, 16
_SAME_STEP = 1  # failures at most this many steps apart count as one step


class Cause(IntEnum):
    """The sign that the end of a rank shows, the weakest first."""

    CONSEQUENCE = 0  # an error of a collective, or a signal from outside: no failure of its own
    ABORTED = 1  # SIGABRT, from the program or a watchdog of its collectives
    RAISED = 2  # any other exception or nonzero status, or memory above the limit
    CRASHED = 3  # SIGSEGV, SIGBUS, or a SIGKILL that its launcher did not send
    HUNG = 4  # the other ranks waited for this rank
    DEVICE = 5  # an exception of the accelerator or of the bus


@dataclass(frozen=True, slots=True, order=True)
class RankFailure:
    """The end of one rank.

    `version` is the newest version that its attempt had begun to save, 0 before the first.
    """

    cause: Cause
    host: str
    rank: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of ranks of one attempt that decide the culprit: for each cause, the lowest ranks on two hosts.

    The result does not depend on the order or number of reports (a join).
    """

    found: frozenset[RankFailure] = frozenset()

    def join(self, more: Iterable[RankFailure]) -> Ends:
        """Return these ends together with `more`."""
        kept: dict[Cause, dict[str, RankFailure]] = {}
        for failure in sorted(self.found.union(more), key=lambda f: (f.cause, f.host, f.rank, f.version)):
            hosts = kept.setdefault(failure.cause, {})
            if failure.host not in hosts and len(hosts) < 2:
                hosts[failure.host] = failure
        return Ends(frozenset(failure for hosts in kept.values() for failure in hosts.values()))

    @property
    def first(self) -> RankFailure | None:
        """Return the rank that failed first, or None if no single rank did.

        None means that all failures are consequences, or that ranks of several nodes failed by themselves.
        """
        worst = max((failure.cause for failure in self.found), default=Cause.CONSEQUENCE)
        chosen = [failure for failure in self.found if failure.cause is worst]
        return chosen[0] if len(chosen) == 1 and worst is not Cause.CONSEQUENCE else None


Key = tuple[int, str, int]  # incarnation, step, attempt


class Blame(NamedTuple):
    """A rank that failed first in one attempt.

    `step` is the number of steps that the attempt had begun to save, 0 before the first.
    """

    rank: int
    cause: Cause
    step: int

    @property
    def counts(self) -> bool:
        """Return whether the node may be the cause.

        Exceptions, and crashes before any step, are attributed to the program.
        """
        if self.cause in (Cause.CONSEQUENCE, Cause.RAISED):
            return False
        return self.step > 0 or self.cause is Cause.DEVICE


class Tally:
    """The blames of one job's nodes, by attempt.

    The tally is bounded: the node blamed longest ago is forgotten first.

    Failures at the same step count once, because the program comes back to the step that it cannot do. A rank that
    fails first on several nodes carries the cause with it, so it counts against none of them.
    """

    def __init__(self) -> None:
        self._by_host: dict[str, dict[Key, Blame]] = {}

    def record_blame(self, host: str, key: Key, blame: Blame) -> bool:
        """Record that a rank of this node failed first in this attempt. Return False if that is known already."""
        blames = self._by_host.pop(host, {})
        is_new = key not in blames
        blames.setdefault(key, blame)
        while len(blames) > MOST_KEYS:
            del blames[next(iter(blames))]
        self._by_host[host] = blames
        while len(self._by_host) > MOST_HOSTS:
            del self._by_host[next(iter(self._by_host))]
        return is_new

    def count_failures(self, host: str) -> int:
        """Return the number of steps at which ranks of this node failed first in a way that counts."""
        elsewhere = {b.rank for name, blames in self._by_host.items() if name != host for b in blames.values()}
        steps = sorted(b.step for b in self._by_host.get(host, {}).values() if b.counts and b.rank not in elsewhere)
        count, last = 0, -_SAME_STEP - 1
        for step in steps:
            if step - last > _SAME_STEP:
                count, last = count + 1, step
        return count

    def list_sick_nodes(self) -> list[str]:
        """Return the sick nodes, sorted."""
        return sorted(host for host in self._by_host if self.count_failures(host) >= SICK)


def describe_cause(cause: Cause) -> str:
    """Return a phrase that describes the cause to a user."""
    return {
        Cause.CONSEQUENCE: "failed because of another rank",
        Cause.ABORTED: "aborted",
        Cause.RAISED: "ended with an error",
        Cause.CRASHED: "was killed or crashed",
        Cause.HUNG: "kept the others waiting",
        Cause.DEVICE: "had an error of its device",
    }[cause]
