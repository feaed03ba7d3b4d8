"""Sealing by agents, up a tree (docs/protocol.md, R2 and R3).

Each agent votes for the stamps that are complete in *all* its pairs of one training set. Votes merge on the way up,
at constant size; the root seals the highest stamp that is complete everywhere, and its word comes back down. A vote
is a promise: the voter keeps the slot until the word decides (`SlotPair.begin`).

The word also *abandons*. Rank A may skip version 5 (its wait for a seal ran out) where rank B has written and
voted for it. B may not recycle 5 on its own judgement; once some pair has begun a later version without having 5,
5 can never be sealed, and the root tells B so. That a pair never goes back (`SlotPair.high`) makes it a lasting
fact, so votes that are late, repeated or out of order cannot turn one decision into the other.

A version is sealed only if all ranks mean the same moment of the training with it (`core.moments`): the marks of all
shards, each counted at its home, add up to 0. Else it is void: abandoned as soon as each home has its shard, and the
decision names it.

One `Root` serves one set in one epoch: recovery starts a new one, and votes name the epoch (R6, in `wire`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gemini_hpc.core.moments import Mark, add, is_common
from gemini_hpc.core.numbers import Count
from gemini_hpc.core.slots import SlotPair, Stamp

FANOUT = 16
_NONE: frozenset[Stamp] = frozenset()


class Marks(NamedTuple):
    """The sum of the marks of a version's shards that are complete at their homes, and the number of these."""

    total: Mark
    shards: Count


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """What some pairs, of one agent or of a whole subtree, say together.

    - `complete`: stamps complete in every one of them.
    - `seen`: stamps complete in at least one of them: those about which somebody waits for a word.
    - `floor`, `kept`: stamps that all of them can still have are those above `floor` and those in `kept`.
      `floor` is the highest stamp that any of the pairs has begun or passed; None where nothing was.
    - `marks`: by stamp, of the shards that live here and are complete. None: some agent, of an earlier release, does
      not say.
    """

    complete: frozenset[Stamp] = _NONE
    seen: frozenset[Stamp] = _NONE
    floor: Stamp | None = None
    kept: frozenset[Stamp] = _NONE
    marks: dict[Stamp, Marks] | None = None

    @property
    def dead(self) -> frozenset[Stamp]:
        """Stamps complete somewhere that some pair does not have and, having gone past them, never will."""
        return frozenset(stamp for stamp in self.seen if not self.possible(stamp))

    def possible(self, stamp: Stamp) -> bool:
        """Whether every pair has `stamp`, is filling it, or can still begin it."""
        return self.floor is None or stamp > self.floor or stamp in self.kept


SILENT = Vote()
"""What stands for a member that has not voted: complete nowhere, so nothing is sealed without it (R3)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The root's decision. Every undecided stamp below `sealed` is as good as abandoned, and not listed.

    Attributes:
        sealed: the newest sealed stamp.
        abandoned: newer stamps that will never be sealed.
        void: of these, the first one since the seal that the ranks do not mean alike.
        why: how they differ, once all ranks' moments are known.
    """

    sealed: Stamp | None = None
    abandoned: frozenset[Stamp] = _NONE
    void: Stamp | None = None
    why: str = ""


def vote_of(pairs: Iterable[SlotPair], expected: int | None = None, own: Iterable[SlotPair] = ()) -> Vote:
    """One agent's vote on all the pairs that it holds for a set. own: those whose ranks live here.

    With fewer pairs than `expected` (shards not registered yet), or none, nothing is complete: a version must not
    be sealed over the head of a shard that is still to come.
    """
    pairs = list(pairs)
    vote = merge(
        Vote(
            complete=pair.complete_stamps(),
            seen=pair.complete_stamps(),
            floor=pair.floor,
            kept=pair.kept,
        )
        for pair in pairs
    )
    if expected is not None and len(pairs) < expected:
        return Vote(_NONE, vote.seen, vote.floor, vote.kept)
    if not pairs:
        return SILENT
    slots = [slot for pair in own for slot in pair.slots if slot.state == "complete"]
    marks = [{slot.stamp: Marks(slot.moment.mark, 1)} for slot in slots if slot.stamp is not None]
    return Vote(vote.complete, vote.seen, vote.floor, vote.kept, _add_marks(marks))


def _add_marks(marks: Iterable[Mapping[Stamp, Marks]]) -> dict[Stamp, Marks]:
    """Return the sums of marks, by stamp."""
    found: dict[Stamp, list[Marks]] = {}
    for some in marks:
        for stamp, mark in some.items():
            found.setdefault(stamp, []).append(mark)
    return {
        s: Marks(add(mark.total for mark in all_), sum(mark.shards for mark in all_)) for s, all_ in found.items()
    }


def merge(votes: Iterable[Vote]) -> Vote:
    """The vote of all the pairs behind `votes`, of which none is behind two of them. Associative and commutative; of
    no vote at all: SILENT."""
    votes = list(votes)
    if not votes:
        return SILENT
    complete = votes[0].complete.intersection(*(vote.complete for vote in votes))
    seen = _NONE.union(*(vote.seen for vote in votes))
    floor = max((vote.floor for vote in votes if vote.floor is not None), default=None)
    candidates = _NONE.union(*(vote.kept for vote in votes))
    kept = frozenset(stamp for stamp in candidates if all(vote.possible(stamp) for vote in votes))
    marks = [vote.marks for vote in votes if vote.marks is not None]
    if len(marks) < len(votes):
        return Vote(complete, seen, floor, kept)
    return Vote(complete, seen, floor, kept, _add_marks(marks))


class Root:
    """The top of the tree: the latest vote of each member of an agreed group. What it has sealed stays sealed, what
    it has abandoned is never sealed.

    It need not outlive its agent: a new root that hears every member again can only find the same (a voter keeps
    what it voted for, a dead stamp stays dead), so a restart delays words and never contradicts one. But a copy that
    is found damaged is no longer kept: so `sealed` is what the restarted root's predecessor has noted (or the plan of
    the recovery says).
    """

    __slots__ = ("_facts", "_sealed", "_void", "_votes", "_why", "members")

    def __init__(self, members: Iterable[Hashable], sealed: Stamp | None = None) -> None:
        self.members = frozenset(members)
        if not self.members:
            raise ValueError("a vote needs at least one member")
        self._votes: dict[Hashable, Vote] = {}
        self._sealed = sealed
        self._facts = SILENT
        self._void: frozenset[Stamp] = _NONE  # not the same moment
        self._why = ""

    def update(self, member: Hashable, vote: Vote, world: int = 0) -> None:
        """A member's newer vote. world: shards of the training. Raises ValueError for one that is not a member
        (R6)."""
        if member not in self.members:
            raise ValueError(f"a vote from {member!r}, who is not a member")
        self._votes[member] = vote
        self._facts = merge((Vote(_NONE, _NONE, vote.floor, vote.kept), self._facts))
        merged = self._merged()
        marks = (merged.marks or {}).items()
        self._void |= {stamp for stamp, mark in marks if mark.shards == world and not is_common(mark.total)}
        for stamp in merged.complete - self._void:
            if self._facts.possible(stamp) and (self._sealed is None or stamp > self._sealed):
                self._sealed, self._why = stamp, ""
        void = {stamp for stamp in self._void if self._sealed is None or stamp > self._sealed}
        self._void = frozenset(stamp for stamp in void if stamp in merged.seen or stamp == min(void))

    def explain(self, why: str) -> None:
        """Note how the ranks differ at the stamp that the decision calls void."""
        self._why = why

    def _merged(self) -> Vote:
        """The members' votes in one; nothing is complete while one of them is silent."""
        return merge(self._votes.get(member, SILENT) for member in self.members)

    def word(self) -> Decision:
        """What is decided by now."""
        undecided = (stamp for stamp in self._merged().seen if self._sealed is None or stamp > self._sealed)
        abandoned = frozenset(s for s in undecided if s in self._void or not self._facts.possible(s))
        return Decision(self._sealed, abandoned, min(self._void, default=None), self._why if self._void else "")


def parent(position: int, fanout: int = FANOUT) -> int | None:
    """Position of the agent that a vote is sent to; None for the root, which has position 0."""
    if position < 0 or fanout < 1:
        raise ValueError(f"no parent of position {position} with a fan-out of {fanout}")
    return None if position == 0 else (position - 1) // fanout


def children(position: int, n: int, fanout: int = FANOUT) -> range:
    """Positions, among n, of the agents whose votes come to `position`."""
    if not 0 <= position < n or fanout < 1:
        raise ValueError(f"no children of position {position} of {n} with a fan-out of {fanout}")
    first = position * fanout + 1
    return range(min(first, n), min(first + fanout, n))
