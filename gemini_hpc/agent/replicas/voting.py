"""Voting in one training: this agent's vote goes up the tree, the root's decision comes down (R2, R3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from gemini_hpc.core.moments import Moment, MomentReport, describe_difference
from gemini_hpc.core.slots import SlotPair, Stamp
from gemini_hpc.core.votes import SILENT, Decision, Root, Vote, build_vote, merge_votes
from gemini_hpc.wire import peer
from gemini_hpc.wire.bounds import Strict


class SubtreeVote(msgspec.Struct, frozen=True):
    """A vote with the facts that the root needs to count it.

    Attributes:
        vote: The vote.
        pairs: Number of slot pairs behind the vote.
        world: Number of shards of the training.
        degraded: Whether a peer is missing.
        kinds: Whether the pairs are RESUMED or REGISTERED. Both bits mean pairs of different nodes, and prevent a
            seal.
        reports: Moments of the ranks at the version that the root's decision calls void.
    """

    vote: Vote
    pairs: int
    world: int
    degraded: bool = False
    kinds: int = 0
    reports: tuple[MomentReport, ...] = ()


RESUMED, REGISTERED = 1, 2
_REMEMBERED = 16  # versions whose moments are remembered: more than begin while a decision travels
_NOTHING = SubtreeVote(SILENT, 0, 0)
_decoder = Strict(msgspec.msgpack.Decoder(Vote))


def to_wire(round_number: int, training_name: str, ballot: SubtreeVote) -> peer.VoteUp:
    """Return the message for a ballot."""
    raw = msgspec.Raw(msgspec.msgpack.encode(ballot.vote))
    return peer.VoteUp(
        round_number, training_name, ballot.pairs, ballot.world, ballot.degraded, ballot.kinds, raw, ballot.reports
    )


def from_wire(message: peer.VoteUp) -> SubtreeVote:
    """Return the ballot in a message.

    Raises:
        msgspec.MsgspecError: The vote in the message is malformed.
    """
    vote = _decoder.decode(message.vote)
    return SubtreeVote(vote, message.pairs, message.world, message.degraded, message.kinds, message.reports)


class Voting:
    """The votes of this agent and its children for one training in one round, and the root's decision as known here.

    A node that holds no slot of the training has no vote. The root seals only while the pairs voted for number world
    x `pairs_each`. A missing shard or holder is therefore always noticed.
    """

    def __init__(
        self,
        pairs_each: int,
        children: Iterable[str],
        send_up: Callable[[SubtreeVote], object] | None,
        spread_decision: Callable[[Decision, bool], None],
        settled: Stamp | None = None,
    ) -> None:
        """Create the votes of a round, empty.

        Args:
            pairs_each: Slot pairs that each shard must have.
            children: Hosts of this agent's children in the tree.
            send_up: Called with this agent's merged ballot. None at the root.
            spread_decision: Called with each decision and with the degraded flag.
            settled: Stamp that counts as sealed at the start.
        """
        self._pairs_each = pairs_each
        self._own = _NOTHING
        self._below = dict.fromkeys(children, _NOTHING)
        self._send_up, self._spread_decision = send_up, spread_decision
        self._root = Root(["job"], settled) if send_up is None else None
        self._sent: SubtreeVote | None = None
        self._missing = False
        self.decision = Decision()
        self.degraded = False
        self.voted: frozenset[Stamp] = frozenset()
        self._moments: dict[Stamp, dict[int, Moment]] = {}  # of the versions voted for, by rank
        self._reports: tuple[MomentReport, ...] = ()

    def recount(self, pairs: list[SlotPair], world: int, kind: int, homes: Mapping[int, SlotPair]) -> None:
        """Vote anew after a change on this node.

        Args:
            pairs: All slot pairs that count here.
            world: Number of shards of the training.
            kind: RESUMED or REGISTERED.
            homes: Pairs of the shards whose ranks live here, by rank.
        """
        for rank, pair in homes.items():
            for slot in pair.slots:
                if slot.state == "complete" and slot.stamp is not None:
                    self._moments.setdefault(slot.stamp, {})[rank] = slot.moment
        self._moments = {stamp: self._moments[stamp] for stamp in sorted(self._moments)[-_REMEMBERED:]}
        vote = build_vote(pairs, own=homes.values())
        self._own = SubtreeVote(vote, len(pairs), world, kinds=kind, reports=self._reports) if pairs else _NOTHING
        self._send_vote()

    def record_missing(self, missing: bool) -> None:
        """Record whether this agent misses one of its peers."""
        if missing != self._missing:
            self._missing = missing
            self._send_vote()

    def on_vote(self, child: str, ballot: SubtreeVote) -> None:
        """Record a child's newer vote."""
        if child in self._below:
            self._below[child] = ballot
            self._send_vote()

    def repeat(self) -> None:
        """Send the vote again, because the link to the parent is new."""
        self._sent = None
        self._send_vote()

    def _merge_ballots(self) -> SubtreeVote:
        ballots = [b for b in (self._own, *self._below.values()) if b.pairs]
        degraded = self._missing or any(b.degraded for b in self._below.values())
        vote = merge_votes(b.vote for b in ballots) if ballots else SILENT
        kinds = 0
        for b in ballots:
            kinds |= b.kinds
        world = max((b.world for b in ballots), default=0)
        reports = tuple(report for b in ballots for report in b.reports)
        return SubtreeVote(vote, sum(b.pairs for b in ballots), world, degraded, kinds, reports)

    def _send_vote(self) -> None:
        self.voted |= self._own.vote.complete  # before the vote is sent: a version voted for must be kept
        ballot = self._merge_ballots()
        if self._root is None:
            if ballot != self._sent and self._send_up is not None:
                self._sent = ballot
                self._send_up(ballot)
            return
        vote = ballot.vote
        if ballot.pairs != ballot.world * self._pairs_each or ballot.kinds not in (RESUMED, REGISTERED):
            vote = Vote(frozenset(), vote.seen, vote.floor, vote.kept)
        self._root.record_vote("job", vote, ballot.world)
        word = self._root.decide()
        if word.void is not None and word.void == self.decision.void and len(ballot.reports) == ballot.world:
            self._root.record_difference(describe_difference(word.void.version, ballot.reports))
            word = self._root.decide()
        self.on_decision(word, ballot.degraded)

    def on_decision(self, word: Decision, degraded: bool) -> None:
        """Take the root's decision, and pass it on to the children and the trainers."""
        if word == self.decision and degraded == self.degraded:
            return
        self.degraded = degraded
        sealed, known = word.sealed, self.decision.sealed
        if known is not None and (sealed is None or sealed < known):
            # A restarted root may not know yet which version is sealed. The versions that it abandons stay abandoned.
            word = Decision(known, frozenset(s for s in word.abandoned if s > known))
            sealed = known
        void, self.decision = self.decision.void, word
        if sealed is not None:
            self.voted = frozenset(s for s in self.voted if s > sealed)
        self._spread_decision(word, degraded)
        if word.void != void:
            self._report_moments(word.void)

    def _report_moments(self, void: Stamp | None) -> None:
        """Report the moments of this node's ranks at a void version to the root.

        The slots of an abandoned version can contain a later version before the decision arrives.
        """
        moments = {} if void is None else self._moments.get(void, {})
        self._reports = tuple(MomentReport(rank, *moment[1:]) for rank, moment in moments.items())
        self._own = msgspec.structs.replace(self._own, reports=self._reports)
        self._send_vote()
