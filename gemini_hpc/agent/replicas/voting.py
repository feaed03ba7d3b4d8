"""Voting in one training: this agent's vote goes up the tree, the root's decision comes down (R2, R3).

The rules contain no clock and no socket. They yield the effects of an event. `trainings` carries out each, in order.
A seal is therefore on disk before a message frees older versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.peers.round_events import Heard, Linked, Send
from gemini_hpc.core.moments import Moment, MomentReport, describe_difference
from gemini_hpc.core.slots import SlotPair, Stamp
from gemini_hpc.core.votes import SILENT, Decision, Root, Vote, build_vote, merge_votes
from gemini_hpc.wire import peer


class Recount(msgspec.Struct, frozen=True):
    """The slots of this node after a change.

    Attributes:
        pairs: All slot pairs that count here.
        world: Number of shards of the training.
        kind: RESUMED or REGISTERED.
        homes: Pairs of the shards whose ranks live here, by rank.
    """

    pairs: list[SlotPair]
    world: int
    kind: int
    homes: Mapping[int, SlotPair]


class Missing(msgspec.Struct, frozen=True):
    """A look at the peers. `missing`: this agent misses one of them."""

    missing: bool


class StoreSeal(msgspec.Struct, frozen=True):
    """An order to store the newest seal on disk, for a successor of this agent."""

    sealed: Stamp


class ShowDecision(msgspec.Struct, frozen=True):
    """An order to show the decision to the trainers."""

    word: Decision


Event = Heard | Linked | Recount | Missing
Effect = Send | StoreSeal | ShowDecision


RESUMED, REGISTERED = 1, 2
_REMEMBERED = 16  # versions whose moments are remembered: more than begin while a decision travels


class Voting:
    """The votes of this agent and its children for one training in one round, and the root's decision as known here.

    A node that holds no slot of the training has no vote. The root seals only while the pairs voted for number world
    x `pairs_each`. A missing shard or holder is therefore always noticed.
    """

    def __init__(self, training: str, rounds: RecoveryRounds, pairs_each: int, settled: Stamp | None = None) -> None:
        """Create the votes of a round, empty.

        Args:
            training: Name of the training.
            rounds: The round, and this agent's place in the tree.
            pairs_each: Slot pairs that each shard must have.
            settled: Stamp that counts as sealed at the start.
        """
        self.round, self._pairs_each = rounds.round, pairs_each
        self._own = peer.VoteUp(self.round, training, 0, 0, False, 0, SILENT)
        self._parent, self._below = rounds.parent, dict.fromkeys(rounds.children, self._own)
        self._root = Root(settled) if self._parent is None else None
        self._sent: peer.VoteUp | None = None
        self.decision = Decision()
        self.degraded = False
        self.voted: frozenset[Stamp] = frozenset()
        self._moments: dict[Stamp, dict[int, Moment]] = {}  # of the versions voted for, by rank

    def step(self, event: Event) -> Iterator[Effect]:
        """Yield the effects of an event, in order."""
        match event:
            case Recount(pairs, world, kind, homes):
                self._remember_moments(homes)
                vote = build_vote(pairs, own=homes.values())
                yield from self._vote(pairs=len(pairs), world=world, kinds=kind, vote=vote)
            case Missing(missing) if missing != self._own.degraded:
                yield from self._vote(degraded=missing)
            case Linked():  # the parent may have missed the vote
                self._sent = None
                yield from self._send_vote()
            case Heard(host, peer.VoteUp() as ballot) if host in self._below:
                self._below[host] = ballot
                yield from self._send_vote()
            case Heard(self._parent, peer.DecisionDown() as message):
                word = Decision(message.sealed, frozenset(message.abandoned), message.void, message.why)
                yield from self._on_decision(word, message.degraded)

    def _remember_moments(self, homes: Mapping[int, SlotPair]) -> None:
        for rank, pair in homes.items():
            for slot in pair.slots:
                if slot.state == "complete" and slot.stamp is not None:
                    self._moments.setdefault(slot.stamp, {})[rank] = slot.moment
        self._moments = {stamp: self._moments[stamp] for stamp in sorted(self._moments)[-_REMEMBERED:]}

    def _vote(self, **changes: Any) -> Iterator[Effect]:
        """Vote anew after a change on this node."""
        self._own = msgspec.structs.replace(self._own, **changes)
        yield from self._send_vote()

    def _merge_ballots(self) -> peer.VoteUp:
        everybody = (self._own, *self._below.values())
        ballots = [b for b in everybody if b.pairs]
        return msgspec.structs.replace(
            self._own,
            pairs=sum(b.pairs for b in ballots),
            world=max((b.world for b in ballots), default=0),
            degraded=any(b.degraded for b in everybody),
            kinds=reduce(or_, (b.kinds for b in ballots), 0),
            vote=merge_votes(b.vote for b in ballots),
            reports=tuple(report for b in ballots for report in b.reports),
        )

    def _send_vote(self) -> Iterator[Effect]:
        self.voted |= self._own.vote.complete  # before the vote is sent: a version voted for must be kept
        ballot = self._merge_ballots()
        if self._parent is not None:
            if ballot != self._sent:
                self._sent = ballot
                yield Send(self._parent, ballot)
            return
        assert self._root is not None
        vote = ballot.vote
        if ballot.pairs != ballot.world * self._pairs_each or ballot.kinds not in (RESUMED, REGISTERED):
            vote = Vote(frozenset(), vote.seen, vote.floor, vote.kept)
        self._root.record_vote(vote, ballot.world)
        word = self._root.decide()
        if word.void is not None and word.void == self.decision.void and len(ballot.reports) == ballot.world:
            self._root.record_difference(describe_difference(word.void.version, ballot.reports))
            word = self._root.decide()
        yield from self._on_decision(word, ballot.degraded)

    def _on_decision(self, word: Decision, degraded: bool) -> Iterator[Effect]:
        """Take the root's decision, and pass it on to the children and the trainers."""
        if word == self.decision and degraded == self.degraded:
            return
        before, known = self.decision, self.decision.sealed
        if known is not None and (word.sealed is None or word.sealed < known):
            # A restarted root may not know yet which version is sealed. The versions that it abandons stay abandoned.
            word = Decision(known, frozenset(s for s in word.abandoned if s > known))
        self.decision, self.degraded = word, degraded
        if (sealed := word.sealed) is not None:
            self.voted = frozenset(s for s in self.voted if s > sealed)
            if sealed != known:
                yield StoreSeal(sealed)
        message = self.build_decision(self.round)
        for child in self._below:
            yield Send(child, message)
        yield ShowDecision(word)
        if word.void != before.void:
            yield from self._report_moments(word.void)

    def build_decision(self, number: int) -> peer.DecisionDown:
        """Return the message with the decision for agents in the round of this number."""
        word, abandoned = self.decision, tuple(sorted(self.decision.abandoned))
        name, degraded = self._own.training, self.degraded
        return peer.DecisionDown(number, name, word.sealed, abandoned, degraded, word.void, word.why[:1000])

    def _report_moments(self, void: Stamp | None) -> Iterator[Effect]:
        """Report the moments of this node's ranks at a void version to the root.

        The slots of an abandoned version can contain a later version before the decision arrives.
        """
        moments = {} if void is None else self._moments.get(void, {})
        yield from self._vote(reports=tuple(MomentReport(rank, *moment[1:]) for rank, moment in moments.items()))
