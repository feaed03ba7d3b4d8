"""Which peers count as dead: the decisions of a failure detector with indirect probes, as in SWIM.

A partner that has been silent for too long is suspected, and probed: by this agent, and by a few others for it. Whom
anybody can reach is alive. Whom nobody can reach is dead, which all are told (an obituary); another's obituary is
believed about a peer of which nothing has been heard for half that time. A dead peer that is heard of again is alive,
which all are told too. Who has left, after a training that succeeded, is neither suspected nor dead.

No clock, no socket and nothing that waits is here: each call names the time (monotonic), and returns what is to be
done, in that order. `mesh` does it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_WITNESSES = 3
COMES_S = 4.0  # within which a survivor of the incarnation before should be heard: no prolog of it need have run


@dataclass(frozen=True)
class Probe:
    """Try for so long to reach a suspect, have these peers try, wait for their answers for so long; then `judge`."""

    host: str
    witnesses: tuple[str, ...]
    direct_s: float
    indirect_s: float


@dataclass(frozen=True)
class Liveness:
    """Tell all peers that this one is dead, or alive again."""

    host: str
    alive: bool


@dataclass(frozen=True)
class Dead:
    """This peer is dead; witnesses could not reach it. known: that is no news."""

    host: str
    witnesses: tuple[str, ...]
    known: bool


Effect = Probe | Liveness | Dead


class FailureDetector:
    """Of one agent in one incarnation, about the hosts of its list. silence_s: after which a peer is suspected.
    expected: those that have an agent already. Of the others it is not known when they come, so they are suspected
    only once they have been heard."""

    def __init__(
        self, me: str, hosts: Collection[str], silence_s: float, now: float, expected: Collection[str] = ()
    ) -> None:
        self._me, self._hosts, self._silence_s = me, frozenset(hosts) - {me}, silence_s
        self._ticked_at = now
        self._comes = dict.fromkeys(self._hosts.intersection(expected), now + COMES_S)
        self.partners: set[str] = set()  # to whom there should be a link
        self.heard: dict[str, float] = {}  # when, last
        self.suspects: set[str] = set()
        self.dead: set[str] = set()
        self.left: set[str] = set()
        self.watching = True

    def silent(self, links: Collection[str]) -> set[str]:
        """Partners that are suspected, or whose link is lost."""
        lost = {host for host in self.partners if host not in links and host in self.heard}
        return self.suspects | (lost - self.left)

    def hear(self, host: str, at: float) -> list[Effect]:
        """Something came from this peer then."""
        self.heard[host] = at
        self.left.discard(host)
        return self._alive(host)

    def leaves(self, host: str) -> list[Effect]:
        """This peer says that it ends, and why that is well."""
        self.left.add(host)
        self.suspects.discard(host)
        return self._alive(host)

    def tick(self, now: float, links: Collection[str]) -> list[Effect]:
        """Called once a heartbeat: whom to suspect. links: hosts to which there is one."""
        if now - self._ticked_at > 2 * self._silence_s:  # we ourselves were stopped: hear first, judge later
            for host in self.heard:
                self.heard[host] = now
            self._comes = dict.fromkeys(self._comes, now + COMES_S)
        self._ticked_at = now
        if not self.watching:
            return []
        last = {**self._comes, **self.heard}
        late = [host for host in self.partners - self.left if now - last.get(host, now) > self._silence_s]
        fresh = [host for host in late if host not in self.dead and host not in self.suspects]
        self.suspects.update(fresh)
        return [self._probe(host, links) for host in fresh]

    def _probe(self, host: str, links: Collection[str]) -> Probe:
        able = [other for other in links if other != host and other not in self.suspects]
        return Probe(host, tuple(able[:MAX_WITNESSES]), self._silence_s / 2, self._silence_s)

    def judge(self, probe: Probe, mine: bool, theirs: Sequence[bool | None], now: float) -> list[Effect]:
        """What came of a probe. theirs: whether each witness could reach the suspect; None: it has not answered."""
        self.suspects.discard(probe.host)
        if mine or any(theirs) or probe.host in self.left:
            self.heard[probe.host] = now
            return []
        if not self.watching:
            return []
        agree = tuple(other for other, reached in zip(probe.witnesses, theirs, strict=True) if reached is False)
        return self._bury(probe.host, (self._me, *agree))

    def give_up(self, probe: Probe) -> None:
        """Nothing came of it."""
        self.suspects.discard(probe.host)

    def told(self, sender: str, host: str, *, alive: bool, now: float) -> list[Effect]:
        """A peer's obituary."""
        if host not in self._hosts:
            return []
        if alive:
            return self._alive(host)
        heard = self.heard.get(host)
        fresh = heard is not None and now - heard <= self._silence_s / 2
        return [] if fresh or host in self.dead | self.left else self._bury(host, (sender,))

    def _bury(self, host: str, witnesses: tuple[str, ...]) -> list[Effect]:
        known = host in self.dead
        self.dead.add(host)
        news: list[Effect] = [] if known else [Liveness(host, False)]
        return [*news, Dead(host, witnesses, known)]

    def _alive(self, host: str) -> list[Effect]:
        if host not in self.dead:
            return []
        self.dead.discard(host)
        return [Liveness(host, True)]
