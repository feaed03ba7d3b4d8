"""Voting in one training: this agent's vote goes up the tree, the root's decision comes down (R2, R3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from gemini_hpc.core.moments import Report, describe_difference
from gemini_hpc.core.slots import SlotPair, Stamp
from gemini_hpc.core.votes import SILENT, Decision, Root, Vote, merge, vote_of
from gemini_hpc.wire import peer
from gemini_hpc.wire.bounds import Strict


class Ballot(msgspec.Struct, frozen=True):
    """A vote, the number of slot pairs behind it, the number of shards that the training has, whether a peer is
    missing, and whether the pairs are RESUMED or REGISTERED (or both, of different nodes: no seal then). reports: the
    moments of the ranks at the version that the root's decision calls void."""

    vote: Vote
    pairs: int
    world: int
    degraded: bool = False
    kinds: int = 0
    reports: tuple[Report, ...] = ()


RESUMED, REGISTERED = 1, 2
_NOTHING = Ballot(SILENT, 0, 0)
_decoder = Strict(msgspec.msgpack.Decoder(Vote))


def to_wire(round_number: int, set_name: str, ballot: Ballot) -> peer.VoteUp:
    """The message for a ballot."""
    raw = msgspec.Raw(msgspec.msgpack.encode(ballot.vote))
    return peer.VoteUp(
        round_number, set_name, ballot.pairs, ballot.world, ballot.degraded, ballot.kinds, raw, ballot.reports
    )


def from_wire(message: peer.VoteUp) -> Ballot:
    """The ballot in a message. Raises msgspec.MsgspecError."""
    vote = _decoder.decode(message.vote)
    return Ballot(vote, message.pairs, message.world, message.degraded, message.kinds, message.reports)


class Voting:
    """The votes of this agent and its children for one set in one round; the root's word as known here.

    A node that holds nothing of the set has no voice; but the root seals only while the pairs that were voted
    for number world x `pairs_each`, so that no shard and no holder can be missing unnoticed.
    """

    def __init__(
        self,
        pairs_each: int,
        children: Iterable[str],
        up: Callable[[Ballot], None] | None,
        spread: Callable[[Decision, bool], None],
        settled: Stamp | None = None,
    ) -> None:
        """up, spread: called with this agent's vote, and with each decision. settled: what counts as sealed."""
        self._pairs_each = pairs_each
        self._own = _NOTHING
        self._below = dict.fromkeys(children, _NOTHING)
        self._up, self._spread = up, spread
        self._root = Root(["job"], settled) if up is None else None
        self._sent: Ballot | None = None
        self._missing = False
        self.word = Decision()
        self.degraded = False
        self.voted: frozenset[Stamp] = frozenset()
        self._homes: dict[int, SlotPair] = {}
        self._reports: tuple[Report, ...] = ()

    def recount(self, pairs: list[SlotPair], world: int, kind: int, homes: Mapping[int, SlotPair]) -> None:
        """Vote anew after something has changed on this node.

        Args:
            pairs: all that count here.
            world: shards of the training.
            kind: RESUMED or REGISTERED.
            homes: by rank, the pairs of shards whose ranks live here.
        """
        self._homes = dict(homes)
        vote = vote_of(pairs, own=homes.values())
        self._own = Ballot(vote, len(pairs), world, kinds=kind, reports=self._reports) if pairs else _NOTHING
        self._tell()

    def miss(self, missing: bool) -> None:
        """Whether this agent misses one of its peers."""
        if missing != self._missing:
            self._missing = missing
            self._tell()

    def heard(self, child: str, ballot: Ballot) -> None:
        """A child's newer vote."""
        if child in self._below:
            self._below[child] = ballot
            self._tell()

    def repeat(self) -> None:
        """The link upward is new: vote again."""
        self._sent = None
        self._tell()

    def _merged(self) -> Ballot:
        ballots = [b for b in (self._own, *self._below.values()) if b.pairs]
        degraded = self._missing or any(b.degraded for b in self._below.values())
        vote = merge(b.vote for b in ballots) if ballots else SILENT
        kinds = 0
        for b in ballots:
            kinds |= b.kinds
        world = max((b.world for b in ballots), default=0)
        reports = tuple(report for b in ballots for report in b.reports)
        return Ballot(vote, sum(b.pairs for b in ballots), world, degraded, kinds, reports)

    def _tell(self) -> None:
        self.voted |= self._own.vote.complete  # before it can be told: what has been told is kept
        ballot = self._merged()
        if self._root is None:
            if ballot != self._sent and self._up is not None:
                self._sent = ballot
                self._up(ballot)
            return
        vote = ballot.vote
        if ballot.pairs != ballot.world * self._pairs_each or ballot.kinds not in (RESUMED, REGISTERED):
            vote = Vote(frozenset(), vote.seen, vote.floor, vote.kept)
        self._root.update("job", vote, ballot.world)
        word = self._root.word()
        if word.void is not None and word.void == self.word.void and len(ballot.reports) == ballot.world:
            self._root.explain(describe_difference(word.void.version, ballot.reports))
            word = self._root.word()
        self.hear(word, ballot.degraded)

    def hear(self, word: Decision, degraded: bool) -> None:
        """The root's word; it goes on to the children and to the trainers."""
        if word == self.word and degraded == self.degraded:
            return
        self.degraded = degraded
        sealed, known = word.sealed, self.word.sealed
        if known is not None and (sealed is None or sealed < known):
            # A root that has been started again may not know yet what is sealed; what it abandons is dead.
            word = Decision(known, frozenset(s for s in word.abandoned if s > known))
            sealed = known
        void, self.word = self.word.void, word
        if sealed is not None:
            self.voted = frozenset(s for s in self.voted if s > sealed)
        self._spread(word, degraded)
        if word.void != void:
            self._report(word.void)

    def _report(self, void: Stamp | None) -> None:
        """Have the root know the moments of the ranks here, before their slots are given to another version."""
        slots = {rank: slot for rank, pair in self._homes.items() for slot in pair.slots if slot.stamp == void}
        self._reports = tuple(Report(rank, *slot.moment[1:]) for rank, slot in slots.items() if void is not None)
        self._own = msgspec.structs.replace(self._own, reports=self._reports)
        self._tell()
