"""The sealing of versions by agents, along a tree (docs/dev/protocol.md, R2 and R3).

Each agent votes for the stamps that are complete in *all* its pairs of one training. Votes merge on the way up, at
constant size. The root seals the highest stamp that is complete everywhere, and its decision comes back down. A vote
is a promise: the voter keeps the slot until the decision arrives (`SlotPair.begin_version`).

The decision also *abandons* stamps. Rank A may skip version 5 (its wait for a seal ran out) while rank B has written
and voted for it. B may not recycle version 5 on its own judgement. Once some pair has begun a later version without
version 5, that version can never be sealed, and the root reports this to B. A pair never goes back
(`SlotPair.high`), so this fact is permanent. Late, repeated or reordered votes therefore cannot turn one decision
into the other.

A version is sealed only if all ranks mean the same moment of the training with it (`core.moments`). The marks of all
shards, each counted at its home, then add up to 0. Otherwise the version is void: it is abandoned as soon as each
home has its shard, and the decision names it.

A `Root` serves one training in one epoch. Recovery starts a new root, and votes name the epoch (R6, in `wire`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gemini_hpc.core.moments import Mark, add_marks, is_common
from gemini_hpc.core.numbers import Count
from gemini_hpc.core.slots import SlotPair, Stamp

FANOUT = 16
_NONE: frozenset[Stamp] = frozenset()


class Marks(NamedTuple):
    """The sum of the marks of a version's shards, and the number of these shards.

    Only shards that are complete at their homes count.
    """

    total: Mark
    shards: Count


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """The merged vote of some pairs, of one agent or of a whole subtree.

    - `complete`: stamps complete in every one of them.
    - `seen`: stamps complete in at least one of them. Some rank waits for a decision about these.
    - `floor`, `kept`: the stamps that all pairs can still have are those above `floor` and those in `kept`. `floor`
      is the highest stamp that any of the pairs has begun or passed; None if no pair has.
    - `marks`: by stamp, the marks of the shards that live here and are complete. None: some agent of an earlier
      release reports no marks.
    """

    complete: frozenset[Stamp] = _NONE
    seen: frozenset[Stamp] = _NONE
    floor: Stamp | None = None
    kept: frozenset[Stamp] = _NONE
    marks: dict[Stamp, Marks] | None = None

    @property
    def dead(self) -> frozenset[Stamp]:
        """Return the stamps complete in some pair that another pair has passed and will never have."""
        return frozenset(stamp for stamp in self.seen if not self.is_possible(stamp))

    def is_possible(self, stamp: Stamp) -> bool:
        """Return whether every pair has `stamp`, is filling it, or can still begin it."""
        return self.floor is None or stamp > self.floor or stamp in self.kept


SILENT = Vote()
"""The vote of a member that has not voted: complete nowhere, so nothing is sealed without the member (R3)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The root's decision. Every undecided stamp below `sealed` counts as abandoned and is not listed.

    Attributes:
        sealed: The newest sealed stamp.
        abandoned: Newer stamps that will never be sealed.
        void: Among these, the first since the seal whose ranks do not mean the same moment.
        why: Description of how they differ, once all ranks' moments are known.
    """

    sealed: Stamp | None = None
    abandoned: frozenset[Stamp] = _NONE
    void: Stamp | None = None
    why: str = ""


def build_vote(pairs: Iterable[SlotPair], own: Iterable[SlotPair] = ()) -> Vote:
    """Return one agent's vote on all the pairs that it holds for a training.

    `own` are the pairs whose ranks live here. Without pairs nothing is complete.
    """
    pairs = list(pairs)
    if not pairs:
        return SILENT
    vote = merge_votes(
        Vote(pair.list_complete_stamps(), pair.list_complete_stamps(), pair.floor, pair.kept) for pair in pairs
    )
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
        s: Marks(add_marks(mark.total for mark in all_), sum(mark.shards for mark in all_))
        for s, all_ in found.items()
    }


def merge_votes(votes: Iterable[Vote]) -> Vote:
    """Return the vote of all the pairs behind `votes`, where no pair is behind two of them.

    The operation is associative and commutative. Without votes the result is SILENT.
    """
    votes = list(votes)
    if not votes:
        return SILENT
    complete = votes[0].complete.intersection(*(vote.complete for vote in votes))
    seen = _NONE.union(*(vote.seen for vote in votes))
    floor = max((vote.floor for vote in votes if vote.floor is not None), default=None)
    candidates = _NONE.union(*(vote.kept for vote in votes))
    kept = frozenset(stamp for stamp in candidates if all(vote.is_possible(stamp) for vote in votes))
    marks = [vote.marks for vote in votes if vote.marks is not None]
    if len(marks) < len(votes):
        return Vote(complete, seen, floor, kept)
    return Vote(complete, seen, floor, kept, _add_marks(marks))


class Root:
    """The top of the tree, with the latest vote of all agents, merged.

    A sealed stamp stays sealed, and an abandoned stamp is never sealed. A root need not outlive its agent. A new
    root that receives every member's vote again can only find the same. A voter keeps the copies that it voted for,
    and a dead stamp stays dead. So a restart delays decisions and never contradicts one. But a copy that is found
    damaged is no longer kept. So `sealed` is the stamp that the restarted root's predecessor has noted (or that the
    plan of the recovery gives).
    """

    __slots__ = ("_facts", "_sealed", "_void", "_vote", "_why")

    def __init__(self, sealed: Stamp | None = None) -> None:
        self._vote = self._facts = SILENT
        self._sealed = sealed
        self._void: frozenset[Stamp] = _NONE  # stamps that the ranks do not mean alike
        self._why = ""

    def record_vote(self, vote: Vote, world: int = 0) -> None:
        """Record the newer vote of all agents. `world` is the number of shards of the training."""
        self._vote, self._facts = vote, merge_votes((Vote(_NONE, _NONE, vote.floor, vote.kept), self._facts))
        marks = (vote.marks or {}).items()
        self._void |= {stamp for stamp, mark in marks if mark.shards == world and not is_common(mark.total)}
        for stamp in vote.complete - self._void:
            if self._facts.is_possible(stamp) and (self._sealed is None or stamp > self._sealed):
                self._sealed, self._why = stamp, ""
        void = {stamp for stamp in self._void if self._sealed is None or stamp > self._sealed}
        self._void = frozenset(stamp for stamp in void if stamp in vote.seen or stamp == min(void))

    def record_difference(self, why: str) -> None:
        """Record how the ranks differ at the stamp that the decision calls void."""
        self._why = why

    def decide(self) -> Decision:
        """Return the decision so far."""
        undecided = (stamp for stamp in self._vote.seen if self._sealed is None or stamp > self._sealed)
        abandoned = frozenset(s for s in undecided if s in self._void or not self._facts.is_possible(s))
        return Decision(self._sealed, abandoned, min(self._void, default=None), self._why if self._void else "")


def find_parent(position: int, fanout: int = FANOUT) -> int | None:
    """Return the position of the agent that a vote is sent to; None for the root, which has position 0."""
    if position < 0 or fanout < 1:
        raise ValueError(f"no parent of position {position} with a fan-out of {fanout}")
    return None if position == 0 else (position - 1) // fanout


def list_children(position: int, n: int, fanout: int = FANOUT) -> range:
    """Return the positions, among n, of the agents whose votes arrive at `position`."""
    if not 0 <= position < n or fanout < 1:
        raise ValueError(f"no children of position {position} of {n} with a fan-out of {fanout}")
    first = position * fanout + 1
    return range(min(first, n), min(first + fanout, n))
