"""The report of how ranks differ, where a slot goes to a later version before the root's decision arrives."""

from __future__ import annotations

from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.peers.round_events import Heard, Send
from gemini_hpc.agent.replicas.voting import REGISTERED, Event, Recount, Voting
from gemini_hpc.core.moments import Moment
from gemini_hpc.core.slots import SlotPair, Stamp
from gemini_hpc.wire.peer import DecisionDown, VoteUp

SEALED = Stamp(1, 12)


class Node:
    """A node with one rank, whose copies live on this node only."""

    def __init__(self, rank: int) -> None:
        self.rank, self.pair, self.name = rank, SlotPair(), f"n{rank + 1}"
        self.sent: list[VoteUp] = []
        self.decisions: list[DecisionDown] = []
        rounds = RecoveryRounds(self.name, "", ("n1", "n2"), lambda tier: False)
        self.voting = Voting("default", rounds, 1, SEALED)
        self.save(SEALED, Moment(0, 12, 1))

    def save(self, stamp: Stamp, moment: Moment) -> None:
        index = self.pair.begin_version(stamp, SEALED, self.voting.decision.abandoned, voted=self.voting.voted)
        self.pair.complete_slot(index, stamp, "digest", 1, moment)
        self.step(Recount([self.pair], 2, REGISTERED, {self.rank: self.pair}))

    def step(self, event: Event) -> None:
        for effect in self.voting.step(event):
            match effect:
                case Send("n1", VoteUp() as ballot):
                    self.sent.append(ballot)
                case Send("n2", DecisionDown() as decision):
                    self.decisions.append(decision)


def test_a_void_version_is_explained_although_one_of_its_slots_has_a_later_one() -> None:
    root, child = Node(0), Node(1)
    void, later = Stamp(1, 14), Stamp(1, 15)
    child.save(void, Moment(5, 13, 1))
    ballot = child.sent[-1]
    child.step(Heard("n1", DecisionDown(0, "default", SEALED, (void,), False)))  # abandoned before all have it
    child.pair.begin_version(later, SEALED, child.voting.decision.abandoned, voted=child.voting.voted)
    root.save(void, Moment(7, 14, 1))
    root.step(Heard("n2", ballot))
    assert root.decisions[-1].void == void and not root.decisions[-1].why
    child.step(Heard("n1", root.decisions[-1]))
    root.step(Heard("n2", child.sent[-1]))
    assert "rank 1 has made 1 step() call more" in root.decisions[-1].why
