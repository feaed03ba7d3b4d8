"""Which peers count as dead: the decisions of a failure detector with indirect probes, as in SWIM.

A partner that has been silent for too long is suspected, and probed: by this agent, and by a few others for it. Whom
anybody can reach is alive. Whom nobody can reach is dead, which all are told (an obituary); another's obituary is
believed about a peer of which nothing has been heard for half that time, unless who says so counted as dead itself a
moment ago. A dead peer that is heard of again is alive, which all are told too; then others that count as dead are
looked for once more. Who has left, after a training that succeeded, is neither suspected nor dead.

No clock, no socket and nothing that waits is here: each call names the time (monotonic), and returns what is to be
done, in that order. `mesh` does it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_WITNESSES = MAX_DOUBTS = 3
BACK = 3.0  # times the silence: for so long nothing is believed of the dead, of one who was taken for dead itself
COMES_S = 4.0  # within which a survivor of the incarnation before should be heard: no prolog of it need have run


@dataclass(frozen=True)
class Probe:
    """Try for so long to reach a suspect, have these peers try, wait for their answers for so long; then `judge`."""

    host: str
    witnesses: tuple[str, ...]
    direct_s: float
    indirect_s: float


@dataclass(frozen=True)
class Doubt:
    """Try for so long to reach one that counts as dead; then `found`."""

    host: str
    direct_s: float


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


Effect = Probe | Doubt | Liveness | Dead


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
        self._back: dict[str, float] = {}  # who counted as dead, and was heard again: when
        self._doubted: dict[str, float] = {}  # whose death was looked into once more: when
        self.watching = True
        self._ended_at: float | None = None  # when the job's script had

    def job_ended(self, now: float) -> None:
        """The job has ended here. Whoever is heard of from now on was not lost before; where nobody was, no loss
        matters any more. Where one was, the job is on its way back: who else is lost meanwhile is news, too."""
        self._ended_at = now

    def silent(self, links: Collection[str]) -> set[str]:
        """Partners that are suspected, or whose link is lost."""
        lost = {host for host in self.partners if host not in links and host in self.heard}
        return self.suspects | (lost - self.left)

    def hear(self, host: str, at: float) -> list[Effect]:
        """Something came from this peer then."""
        self.heard[host] = at
        self.left.discard(host)
        return self._alive(host, at)

    def leaves(self, host: str) -> list[Effect]:
        """This peer says that it ends, and why that is well."""
        self.left.add(host)
        self.suspects.discard(host)
        return self._alive(host, self._ticked_at)

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
        if self._ended_at is not None and not self.dead:
            late = [host for host in late if last[host] <= self._ended_at]
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
            return self._alive(probe.host, now)
        if not self.watching:
            return []
        agree = tuple(other for other, reached in zip(probe.witnesses, theirs, strict=True) if reached is False)
        return self._bury(probe.host, (self._me, *agree))

    def found(self, host: str, now: float) -> list[Effect]:
        """One that counts as dead could be reached."""
        self.heard[host] = now
        return self._alive(host, now)

    def give_up(self, probe: Probe) -> None:
        """Nothing came of it."""
        self.suspects.discard(probe.host)

    def told(self, sender: str, host: str, *, alive: bool, now: float) -> list[Effect]:
        """A peer's obituary."""
        if host not in self._hosts:
            return []
        if alive:
            return self._alive(host, now)
        heard = self.heard.get(host)
        fresh = heard is not None and now - heard <= self._silence_s / 2
        if fresh or host in self.dead | self.left or self._was_cut_off(sender, now):
            return []
        return self._bury(host, (sender,))

    def _was_cut_off(self, host: str, now: float) -> bool:
        """Until a moment ago: then it takes for dead whom it could not reach, and says so as soon as it can."""
        back = self._back.get(host)
        return host in self.dead or (back is not None and now - back < BACK * self._silence_s)

    def _bury(self, host: str, witnesses: tuple[str, ...]) -> list[Effect]:
        known = host in self.dead
        self.dead.add(host)
        news: list[Effect] = [] if known else [Liveness(host, False)]
        return [*news, Dead(host, witnesses, known)]

    def _alive(self, host: str, now: float) -> list[Effect]:
        if host not in self.dead:
            return []
        self.dead.discard(host)
        self._back[host] = now
        # If this agent was cut off itself, the others are alive as well, and most of them have no reason to say so.
        long_ago = now - self._silence_s
        again = [other for other in sorted(self.dead) if self._doubted.get(other, long_ago) <= long_ago][:MAX_DOUBTS]
        self._doubted.update(dict.fromkeys(again, now))
        return [Liveness(host, True), *(Doubt(other, self._silence_s / 2) for other in again)]
