"""The report of how ranks differ, where a slot goes to a later version before the root's decision arrives."""

from __future__ import annotations

from gemini_hpc.agent.replicas.voting import REGISTERED, SubtreeVote, Voting
from gemini_hpc.core.moments import Moment
from gemini_hpc.core.slots import SlotPair, Stamp
from gemini_hpc.core.votes import Decision

SEALED = Stamp(1, 12)
NONE: frozenset[Stamp] = frozenset()


class Node:
    """A node with one rank, whose copies live on this node only."""

    def __init__(self, rank: int, up: bool, children: tuple[str, ...] = ()) -> None:
        self.rank, self.pair = rank, SlotPair()
        self.sent: list[SubtreeVote] = []
        self.decisions: list[Decision] = []
        self.voting = Voting(
            1, children, self.sent.append if up else None, lambda word, _: self.decisions.append(word), SEALED
        )
        self.save(SEALED, Moment(0, 12, 1))

    def save(self, stamp: Stamp, moment: Moment) -> None:
        index = self.pair.begin_version(stamp, SEALED, self.voting.decision.abandoned, voted=self.voting.voted)
        self.pair.complete_slot(index, stamp, "digest", 1, moment)
        self.vote()

    def vote(self) -> None:
        self.voting.recount([self.pair], 2, REGISTERED, {self.rank: self.pair})


def test_a_void_version_is_explained_although_one_of_its_slots_has_a_later_one() -> None:
    root, child = Node(0, False, ("n2",)), Node(1, True)
    void, later = Stamp(1, 14), Stamp(1, 15)
    child.save(void, Moment(5, 13, 1))
    ballot = child.sent[-1]
    child.voting.on_decision(Decision(SEALED, frozenset({void})), False)  # abandoned before all have it
    child.pair.begin_version(later, SEALED, child.voting.decision.abandoned, voted=child.voting.voted)
    root.save(void, Moment(7, 14, 1))
    root.voting.on_vote("n2", ballot)
    assert root.decisions[-1].void == void and not root.decisions[-1].why
    child.voting.on_decision(root.decisions[-1], False)
    root.voting.on_vote("n2", child.sent[-1])
    assert "rank 1 has made 1 step() call more" in root.decisions[-1].why
