"""Rules of the salvage: one agent's decisions while surviving nodes save a job's newest sealed version to the tier.

The first reachable host of the list leads:

1. The leader asks all others for their last seal and their copies. The newest seal counts.
2. If the tier has no version as new, the leader names one host for each node rank. That host writes the node rank's
   shards as its file (`core.salvage`).
3. When every rank's shard is on the tier, the version becomes whole as in any save.

The rules contain no clock, no socket and no waiting. Each event comes with the time (monotonic) and with the agent's
facts. The rules return the effects, in order. `salvage` carries them out.

A failed try is repeated after growing gaps, and once more when memory is to be freed. An agent that has not heard the
leader's `SalvageOver` for a while asks it again. A new round or incarnation ends the salvage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gemini_hpc.agent.peers.round_events import Heard, Log, Send
from gemini_hpc.agent.tier import salvage_events as events
from gemini_hpc.agent.tier.salvage_events import Effect, SalvageFacts
from gemini_hpc.agent.tier.save_progress import SaveProgress
from gemini_hpc.core import salvage
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message

REACH_S = 2.0  # time limit to connect to a host
COLLECT_S = 10.0  # the others answer within this time, or count as missing
ASKED_S = 10.0  # a host asked to lead takes the lead within this time
AGAIN_S = 1.0  # interval at which a silent host is contacted again
LOST_S = 10.0  # a writer that is unreachable, or a leader that is silent, for this long is lost
WRITE_S = 3600.0  # all writers finish within this time
GAP_S, LONGEST_GAP_S = 60.0, 900.0  # gap between tries, doubled up to the longest gap
TRIES = 3  # tries for one training, and passes over the list in search of a leader
MAX_TRAININGS = 64
_SHOWN = 8  # ranks or hosts shown in a sentence
SAID = 400


Stage = Literal[
    "idle",
    "reaching",  # checking whether the possible leader is reachable
    "calling",  # waiting for the called host to lead
    "following",
    "settling",  # this and the following stages: leading
    "collecting",
    "looking",
    "writing",
    "publishing",
    "cleaning",
]


@dataclass
class _Lead:
    """The leader's knowledge. The fields from `tries` on concern the training in progress.

    Attributes:
        have: Answers of the hosts, by host.
        unable: Hosts that could not write, by training.
        asking: Hosts whose reachability is being checked.
        asked: Time of the last reachability check, by host, in seconds.
        until: Time at which the leader stops waiting for silent hosts.
        queue: Trainings to save. The first one is in progress.
        done: Whether each finished training was saved.
        tries: Number of tries.
        before: Knowledge at the start of the try.
        first: First reason for a failure.
        orders: Order to write, by host.
        answered: Reason why a host has not written all, or "", by host.
        silent: Time since when a host is unreachable.
    """

    have: dict[str, peer.SalvageHave] = field(default_factory=dict)
    unable: dict[str, set[str]] = field(default_factory=dict)
    asking: set[str] = field(default_factory=set)
    asked: dict[str, float] = field(default_factory=dict)
    until: float = 0.0
    queue: list[peer.Sealed] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)
    tries: int = 0
    before: tuple[int, int] = (0, 0)
    first: str = ""
    orders: dict[str, peer.SalvageWrite] = field(default_factory=dict)
    answered: dict[str, str] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)


class SalvageRules:
    """The salvage decisions of one agent. They live as long as the agent, and concern one incarnation at a time.

    `run` counts the tries. Results of an earlier try's effects are ignored.
    """

    def __init__(self, own_host: str) -> None:
        self._me = own_host
        self.stage: Stage = "idle"
        self.run = 0
        self.leader = ""
        self.saved = False  # all sealed versions are on the tier
        self.reason = ""  # reason of the last failure
        self.gathering: dict[str, SaveProgress] = {}
        self.again_at, self._gap_s = 0.0, GAP_S
        self._asked_last = False  # the additional try before memory is freed has been made
        self._over = False  # the leader has reported the end
        self._tries = self._host_index = (
            0  # number of passes over the list in search of a leader; index of the current host
        )
        self._deadline = 0.0
        self._lead = _Lead()

    @property
    def busy(self) -> bool:
        """Return whether a salvage is in progress."""
        return self.stage != "idle"

    @property
    def leads(self) -> bool:
        """Return whether this agent leads the salvage in progress."""
        return self.busy and self.leader == self._me

    def is_due(self, now: float, *, last: bool) -> bool:
        """Return whether a try is due, if there are versions to save.

        Args:
            now: Current time in seconds.
            last: Memory is to be freed. One more try is made for this at once.
        """
        return not self.busy and not (self._asked_last if last else now < self.again_at)

    def step(self, event: events.Event, facts: SalvageFacts, now: float) -> list[Effect]:
        """Return the effects of an event."""
        if isinstance(event, events.Outcome) and event.run != self.run:
            return []
        return list(self._step(event, facts, now))

    def _step(self, event: events.Event, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        match event:
            case events.Begin():
                self._asked_last = self._asked_last or event.last
                self._gap_s = GAP_S if event.asked else self._gap_s
                if not self.busy:
                    self.leader = ""
                    yield from self._start(facts, now)
            case events.Reset():
                yield from self._reset()
            case events.Tick():
                yield from self._tick(facts, now)
            case Heard():
                yield from self._on_message(event.host, event.message, facts, now)
            case events.Reached():
                yield from self._on_reached(event, facts, now)
            case events.Settled() if self.stage == "settling":
                self._lead.have[self._me] = facts.own
                self.stage, self._lead.until = "collecting", now + COLLECT_S
                yield from self._collect_seals(facts, now)
            case events.Looked() if self.stage == "looking":
                yield from self._on_looked(event, facts, now)
            case events.Published() if self.stage == "publishing":
                yield from self._end_try(event.reason, facts, now)
            case events.Cleaned() if self.stage == "cleaning":
                yield from self._finish_training(False, facts)
            case events.Broken() if self.leads:
                yield from self._end(facts)
            case events.Broken():
                self.stage = "idle"

    # ---- start, reset and ticks ------------------------------------------------------------------------

    def _start(self, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        self.again_at, self._gap_s = now + self._gap_s, min(2 * self._gap_s, LONGEST_GAP_S)
        self._over, self.reason = False, ""
        self.run += 1
        self._tries = self._host_index = 0
        yield from self._seek(facts, now)

    def _reset(self) -> Iterator[Effect]:
        self.run += 1
        self.stage, self.leader, self.saved = "idle", "", False
        self.again_at, self._gap_s, self._asked_last = 0.0, GAP_S, False
        self.gathering.clear()
        self._lead = _Lead()
        yield events.Halt()

    def _tick(self, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        if self.stage == "calling" and now >= self._deadline:
            self._host_index += 1
            yield from self._seek(facts, now)
        elif self.stage == "following":
            yield from self._check_leader(facts, now)
        elif self.stage == "collecting":
            yield from self._collect_seals(facts, now)
        elif self.stage == "writing":
            yield from self._resend_orders(facts, now)

    # ---- choice of a leader ----------------------------------------------------------------------------

    def _check_leader(self, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        if now - facts.heard.get(self.leader, 0.0) > LOST_S:
            self.leader = ""  # the leader cannot be reached any more
            self._tries, self._host_index = self._tries + 1, 0
            if self._tries < TRIES:
                yield from self._seek(facts, now)
            else:
                self.stage = "idle"
        elif now >= self._deadline:  # the report of the end may have been lost with a link
            self._deadline = now + ASKED_S
            yield Send(self.leader, facts.own)

    def _seek(self, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        """Follow the current leader, or find the first reachable host of the list to lead."""
        if self.leader:
            self.stage, self._deadline = "following", now + ASKED_S
            return
        while self._host_index < len(facts.hosts) and facts.hosts[self._host_index] in facts.dead:
            self._host_index += 1
        if self._host_index < len(facts.hosts) and facts.hosts[self._host_index] != self._me:
            self.stage = "reaching"
            yield events.Reach(self.run, facts.hosts[self._host_index], REACH_S)
            return
        self.leader, self.stage, self._lead = self._me, "settling", _Lead()
        for host in self._list_others(facts):
            yield Send(host, peer.SalvageAsk())  # no host leaves or leads while pending saves progress
        yield events.Settle(self.run, COLLECT_S)

    def _list_others(self, facts: SalvageFacts) -> list[str]:
        return [host for host in facts.hosts if host != self._me]

    def _on_reached(self, event: events.Reached, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        host, lead = event.host, self._lead
        if self.stage == "reaching" and host == facts.hosts[self._host_index]:
            if event.there:
                self.stage, self._deadline = "calling", now + ASKED_S
                yield Send(host, msgspec.structs.replace(facts.own, calls=True))
            else:
                self._host_index += 1
                yield from self._seek(facts, now)
        elif self.stage in ("collecting", "writing") and host in lead.asking:
            lead.asking.discard(host)
            lead.asked[host] = now
            if self.stage == "collecting":
                if event.there:
                    yield Send(host, peer.SalvageAsk())
            elif host in self._list_awaited():
                if event.there:
                    lead.silent.pop(host, None)
                    yield Send(host, lead.orders[host])
                else:
                    lead.silent.setdefault(host, now)

    def _on_message(self, host: str, message: Message, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        if isinstance(message, peer.SalvageHave):
            yield from self._on_have(host, message, facts, now)
        elif isinstance(message, (peer.SalvageAsk, peer.SalvageWrite)):
            if not self._may_lead(host, facts):
                return
            yield from self._follow_leader(host, facts, now)
            if isinstance(message, peer.SalvageWrite):
                yield events.Write(message, host)
            else:
                yield Send(host, facts.own)
        elif isinstance(message, peer.SalvageWrote):
            yield from self._on_wrote(host, message, facts, now)
        elif isinstance(message, peer.SalvageOver) and (message.saved or self.leader == host):
            if message.saved:
                self.saved = True
                yield events.Saved()
            self.reason, self._over = message.reason, True
            if self.stage in ("reaching", "calling", "following"):
                self.stage = "idle"

    def _on_have(self, host: str, message: peer.SalvageHave, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        """Handle an answer, a call to lead, or a follower's question whether the salvage is over."""
        if self.leads:
            self._lead.have[host] = message
            if self.stage == "collecting":
                yield from self._collect_seals(facts, now)
        elif self.saved:
            yield Send(host, peer.SalvageOver(True))
        elif self.busy:
            return
        elif not message.calls:
            yield Send(host, peer.SalvageOver(False, self.reason[:SAID]))
        elif facts.detached:
            yield from self._step(events.Begin(), facts, now)

    def _may_lead(self, host: str, facts: SalvageFacts) -> bool:
        """Return whether that host may lead, as far as this agent knows.

        Of two leaders the first one in the list counts. A host that asks has a reason: a node is missing.
        """
        position = facts.hosts.index
        return not (self.busy and self.leader and position(self.leader) < position(host))

    def _follow_leader(self, host: str, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        led, self.leader = self.leads, host
        if not self.saved:
            self._over = False
        if led:  # this agent stops leading
            self.stage = "idle"
            self.gathering.clear()
            yield events.Halt()
        if self.busy:
            self.stage, self._deadline = "following", now + ASKED_S
        elif facts.detached and not self._over:
            yield from self._start(facts, now)

    # ---- the leader ------------------------------------------------------------------------------------

    def _collect_seals(self, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        """Wait for the other hosts' answers, then choose the versions to save."""
        lead = self._lead
        silent = [host for host in self._list_others(facts) if host not in lead.have and host not in facts.dead]
        if silent and now < lead.until:
            yield from self._reach_hosts(silent, now)
            return
        lead.queue = find_newest_seals(lead.have, facts.is_rejected)
        if lead.queue:
            yield from self._find_newest()
        else:
            self.saved = self.saved or facts.unwanted
            yield from self._end(facts)

    def _reach_hosts(self, hosts: Collection[str], now: float) -> Iterator[Effect]:
        lead = self._lead
        for host in hosts:
            if host not in lead.asking and now - lead.asked.get(host, -AGAIN_S) >= AGAIN_S:
                lead.asking.add(host)
                yield events.Reach(self.run, host, REACH_S)

    def _find_newest(self) -> Iterator[Effect]:
        self.stage, self._lead.tries, self._lead.first = "looking", 0, ""
        yield events.Look(self.run, COLLECT_S)

    def _on_looked(self, event: events.Looked, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        wanted = self._lead.queue[0]
        if event.stored is None:
            self.reason = event.reason
            yield from self._finish_training(False, facts)
        elif event.stored.get(wanted.training, Stamp(0, 0)) >= wanted.stamp:
            yield from self._finish_training(True, facts)
        else:
            yield from self._try(facts, now)

    def _try(self, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        """Order all writers to write."""
        lead, wanted = self._lead, self._lead.queue[0]
        name, stamp = wanted.training, wanted.stamp
        gone = [host for host in facts.hosts if host not in lead.have]
        detail = f"{describe_hosts(gone)} missing: saving this version to the tier"
        yield Log("salvaging", detail, stamp.version)
        lead.tries += 1
        lead.before = self._count_answers()
        gathering = self.gathering[name] = SaveProgress(stamp, wanted.world, facts.attempt, now)
        unable = lead.unable.get(name, set())
        held: dict[str, dict[int, set[int]]] = {host: {} for host in lead.have if host not in unable}
        for host, homes in held.items():
            for copy in lead.have[host].held:
                if (copy.training, copy.stamp) == (name, wanted.stamp):
                    homes.setdefault(copy.home, set()).add(copy.rank)
        writers, missing = salvage.assign_writers(held, facts.noderanks, wanted.world)
        if missing:
            shown = ", ".join(map(str, missing[:_SHOWN]))
            more = "" if len(missing) <= _SHOWN else f" and {len(missing) - _SHOWN} more"
            lost = f"the shards of rank {shown}{more} are gone with {', '.join(gone[:_SHOWN])}"
            yield from self._end_try(lost, facts, now)
            return
        lead.orders = {
            host: peer.SalvageWrite(name, wanted.stamp, tuple(sorted(homes)), gathering.attempt)
            for host, homes in writers.items()
        }
        lead.answered, lead.silent, lead.asking, lead.asked = {}, {}, set(), {}
        self.stage = "writing"
        yield from self._resend_orders(facts, now)

    def _count_answers(self) -> tuple[int, int]:
        """Return the basis of a try: how many hosts have answered, and how many of them cannot write."""
        return len(self._lead.have), len(self._lead.unable.get(self._lead.queue[0].training, ()))

    def _list_awaited(self) -> list[str]:
        return [host for host in self._lead.orders if host not in self._lead.answered]

    def _resend_orders(self, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        """Resend the orders, and detect lost hosts."""
        lead, waiting, gathering = self._lead, self._list_awaited(), self.gathering[self._lead.queue[0].training]
        late = now - gathering.began > WRITE_S
        lost = [host for host in waiting if late or now - lead.silent.get(host, now) > LOST_S]
        if lost:
            for host in lost:
                del lead.have[host]
            yield from self._end_try(
                f"{describe_hosts(lost)} {'too slow' if late else 'no longer reachable'}", facts, now
            )
            return
        if self._me in waiting and now - lead.asked.get(self._me, -AGAIN_S) >= AGAIN_S:
            lead.asked[self._me] = now
            yield events.Write(lead.orders[self._me], self._me)
        yield from self._reach_hosts([host for host in waiting if host != self._me], now)

    def _on_wrote(self, host: str, done: peer.SalvageWrote, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        gathering, lead = self.gathering.get(done.training), self._lead
        if gathering is None or (gathering.stamp, gathering.attempt) != (done.stamp, done.attempt):
            return
        if self.stage != "writing" or host not in lead.orders:
            return
        gathering.record_files(done.files)
        lead.answered[host] = done.reason
        if self._list_awaited():
            return
        failed = {host: reason for host, reason in lead.answered.items() if reason}
        if failed:
            lead.unable.setdefault(done.training, set()).update(failed)
            reasons = "; ".join(f"{host}: {reason}" for host, reason in failed.items())
            yield from self._end_try(reasons[:SAID], facts, now)
        else:
            self.stage = "publishing"
            yield events.Publish(self.run, done.training, gathering)

    def _end_try(self, reason: str, facts: SalvageFacts, now: float) -> Iterator[Effect]:
        """End a try. After a failure the training is retried without the hosts that could not write."""
        lead = self._lead
        if not reason:
            yield from self._finish_training(True, facts)
            return
        lead.first = lead.first or reason  # a retry may fail only for lack of the hosts left out
        if lead.tries < TRIES and self._count_answers() != lead.before:
            yield from self._try(facts, now)
            return
        wanted = lead.queue[0]
        self.reason, self.stage = lead.first, "cleaning"
        yield events.Failed(wanted.training, wanted.stamp, lead.first)
        yield events.Clean(self.run, wanted.training, wanted.stamp)

    def _finish_training(self, saved: bool, facts: SalvageFacts) -> Iterator[Effect]:
        lead = self._lead
        lead.done.append(saved)
        self.gathering.pop(lead.queue.pop(0).training, None)
        if lead.queue:
            yield from self._find_newest()
        else:
            self.saved = self.saved or all(lead.done)  # another leader may have saved it meanwhile
            yield from self._end(facts)

    def _end(self, facts: SalvageFacts) -> Iterator[Effect]:
        self.stage = "idle"
        self.gathering.clear()
        if self.saved:
            yield events.Saved()
        for host in self._list_others(facts):
            yield Send(host, peer.SalvageOver(self.saved, self.reason[:SAID]))


def find_newest_seals(
    have: Mapping[str, peer.SalvageHave], is_rejected: Callable[[str, Stamp], bool]
) -> list[peer.Sealed]:
    """Return the newest seal of each training, preferably as reported by a host that holds it."""
    found: dict[str, tuple[peer.Sealed, bool]] = {}
    for answer in have.values():
        held = {(copy.training, copy.stamp) for copy in answer.held}
        for sealed in answer.sealed:
            if is_rejected(sealed.training, sealed.stamp):
                continue
            known, has = found.get(sealed.training), (sealed.training, sealed.stamp) in held
            if known is None or (sealed.stamp, has) > (known[0].stamp, known[1]):
                found[sealed.training] = sealed, has
    return [sealed for sealed, _ in found.values()][:MAX_TRAININGS]


def describe_hosts(hosts: Collection[str]) -> str:
    """Return the hosts with a verb, as the start of a sentence for the user."""
    shown = ", ".join([*hosts][:_SHOWN]) + ("" if len(hosts) <= _SHOWN else f" and {len(hosts) - _SHOWN} more")
    return f"{shown} {'is' if len(hosts) == 1 else 'are'}" if hosts else "no node is"
