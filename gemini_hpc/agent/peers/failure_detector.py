"""The decisions of a failure detector with indirect probes, as in SWIM: which peers count as dead.

A partner that is silent for too long is suspected and probed, by this agent and by a few witnesses. A peer that any
of them can reach is alive. A peer that none can reach is dead, and an obituary goes to all.

An agent believes an obituary only about a peer that has been silent for half that time. An agent ignores an obituary
whose sender counts as dead itself, or recently did.

A dead peer that sends again is alive, which is reported to all peers, too. Other peers that count as dead are then
probed once more. An agent that has sent `AgentLeft` (its training succeeded) is never suspected or declared dead.

The module has no clock and no socket, and never waits. Each call gets the time (monotonic seconds) and returns the
effects to carry out, in that order. `mesh` carries them out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_WITNESSES = MAX_DOUBTS = 3
BACK = 3.0  # multiple of the silence: for this long, ignore death reports of an agent that was itself declared dead
COMES_S = 4.0  # seconds in which a survivor of the last incarnation should send: no prolog need run for it first


@dataclass(frozen=True)
class Probe:
    """A request to reach a suspect directly and through witnesses; then call `judge`.

    Attributes:
        host: The suspect.
        witnesses: Peers that try, too.
        direct_s: Seconds for this agent's own try.
        indirect_s: Seconds to wait for the witnesses' answers.
    """

    host: str
    witnesses: tuple[str, ...]
    direct_s: float
    indirect_s: float


@dataclass(frozen=True)
class Doubt:
    """A request to try, for `direct_s` seconds, to reach a host that counts as dead; then call `record_reached`."""

    host: str
    direct_s: float


@dataclass(frozen=True)
class Liveness:
    """A request to report to all peers that this host is dead, or alive again."""

    host: str
    alive: bool


@dataclass(frozen=True)
class Dead:
    """A peer declared dead.

    Attributes:
        host: The dead peer.
        witnesses: The agents that could not reach it.
        known: The peer already counted as dead.
    """

    host: str
    witnesses: tuple[str, ...]
    known: bool


Effect = Probe | Doubt | Liveness | Dead


class FailureDetector:
    """An agent's failure detector in one incarnation, for the hosts of its list.

    Attributes:
        watching: Partners are being watched. When false, no host is suspected or declared dead.
    """

    def __init__(
        self, own_host: str, hosts: Collection[str], silence_s: float, now: float, expected: Collection[str] = ()
    ) -> None:
        """Create a detector that has no partners yet.

        Args:
            own_host: This agent's host.
            hosts: Hosts of the incarnation.
            silence_s: Silence in seconds after which a peer is suspected.
            now: The time, in monotonic seconds.
            expected: Hosts that have an agent already. The arrival time of others is unknown, so they are suspected
                only after their first message.
        """
        self._me, self._hosts, self._silence_s = own_host, frozenset(hosts) - {own_host}, silence_s
        self._ticked_at = now
        self._comes = dict.fromkeys(self._hosts.intersection(expected), now + COMES_S)
        self.partners: set[str] = set()  # hosts to which there should be a link
        self.last_heard: dict[str, float] = {}  # time of the last message
        self.suspects: set[str] = set()
        self.dead: set[str] = set()
        self.left: set[str] = set()
        self._back: dict[str, float] = {}  # hosts that counted as dead and sent again, with the time
        self._doubted: dict[str, float] = {}  # hosts whose death was probed again, with the time
        self.watching = True
        self._ended_at: float | None = None  # when the job's script ended

    def record_job_end(self, now: float) -> None:
        """Record that the job has ended here.

        A host heard since then was not lost before, and without an earlier loss no loss matters any more. After an
        earlier loss the job is about to restart, so further losses are reported.
        """
        self._ended_at = now

    def list_silent(self, links: Collection[str]) -> set[str]:
        """Return the partners that are suspected, or whose link is lost."""
        lost = {host for host in self.partners if host not in links and host in self.last_heard}
        return self.suspects | (lost - self.left)

    def record_message(self, host: str, now: float) -> list[Effect]:
        """Record a message from this peer at this time."""
        self.last_heard[host] = now
        self.left.discard(host)
        return self._record_alive(host, now)

    def record_leave(self, host: str) -> list[Effect]:
        """Record that this peer has announced its end, after a training that succeeded."""
        self.left.add(host)
        self.suspects.discard(host)
        return self._record_alive(host, self._ticked_at)

    def suspect_silent(self, now: float, links: Collection[str], late_s: float = 0.0) -> list[Effect]:
        """Suspect the partners that are silent, and return their probes. Called once a heartbeat.

        Args:
            now: The time, in monotonic seconds.
            links: Hosts with a link.
            late_s: Seconds by which the call is late. This process was stopped, or had no processor, and received
                nothing. Nobody was silent in that time.
        """
        if late_s > 0:
            for host, at in self.last_heard.items():
                self.last_heard[host] = min(now, at + late_s)
            for host, at in self._comes.items():
                self._comes[host] = at + late_s
        self._ticked_at = now
        if not self.watching:
            return []
        last = {**self._comes, **self.last_heard}
        late = [host for host in self.partners - self.left if now - last.get(host, now) > self._silence_s]
        if self._ended_at is not None and not self.dead:
            late = [host for host in late if last[host] <= self._ended_at]
        fresh = [host for host in late if host not in self.dead and host not in self.suspects]
        self.suspects.update(fresh)
        return [self._build_probe(host, links) for host in fresh]

    def _build_probe(self, host: str, links: Collection[str]) -> Probe:
        able = [other for other in links if other != host and other not in self.suspects]
        return Probe(host, tuple(able[:MAX_WITNESSES]), self._silence_s / 2, self._silence_s)

    def declare_by_probe(
        self, probe: Probe, has_reached: bool, theirs: Sequence[bool | None], now: float
    ) -> list[Effect]:
        """Declare the suspect dead, or alive, by a probe's result. Return the effects.

        Args:
            probe: The probe.
            has_reached: This agent could reach the suspect.
            theirs: Each witness's result, None without an answer.
            now: The time, in monotonic seconds.
        """
        self.suspects.discard(probe.host)
        if has_reached or any(theirs) or probe.host in self.left:
            self.last_heard[probe.host] = now
            return self._record_alive(probe.host, now)
        if not self.watching:
            return []
        agree = tuple(other for other, reached in zip(probe.witnesses, theirs, strict=True) if reached is False)
        return self._declare_dead(probe.host, (self._me, *agree))

    def record_reached(self, host: str, now: float) -> list[Effect]:
        """Record that a host that counts as dead could be reached."""
        self.last_heard[host] = now
        return self._record_alive(host, now)

    def give_up(self, probe: Probe) -> None:
        """End a probe that had no result."""
        self.suspects.discard(probe.host)

    def on_report(self, sender: str, host: str, *, alive: bool, now: float) -> list[Effect]:
        """Handle a peer's report that a host is dead, or alive again."""
        if host not in self._hosts:
            return []
        if alive:
            return self._record_alive(host, now)
        heard = self.last_heard.get(host)
        fresh = heard is not None and now - heard <= self._silence_s / 2
        if fresh or host in self.dead | self.left or self._was_cut_off(sender, now):
            return []
        return self._declare_dead(host, (sender,))

    def _was_cut_off(self, host: str, now: float) -> bool:
        """Return whether this host counts as dead, or did recently.

        The host's own death reports are then unreliable. After being cut off, the host takes the peers that it could
        not reach for dead, and reports them as soon as it can.
        """
        back = self._back.get(host)
        return host in self.dead or (back is not None and now - back < BACK * self._silence_s)

    def _declare_dead(self, host: str, witnesses: tuple[str, ...]) -> list[Effect]:
        known = host in self.dead
        self.dead.add(host)
        news: list[Effect] = [] if known else [Liveness(host, False)]
        return [*news, Dead(host, witnesses, known)]

    def _record_alive(self, host: str, now: float) -> list[Effect]:
        if host not in self.dead:
            return []
        self.dead.discard(host)
        self._back[host] = now
        # If this agent was cut off itself, the others are alive, too, and most have no reason to report so.
        long_ago = now - self._silence_s
        again = [other for other in sorted(self.dead) if self._doubted.get(other, long_ago) <= long_ago][:MAX_DOUBTS]
        self._doubted.update(dict.fromkeys(again, now))
        return [Liveness(host, True), *(Doubt(other, self._silence_s / 2) for other in again)]
