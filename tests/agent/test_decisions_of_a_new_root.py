"""An agent carries out the decisions of the root, also of a root that was started again."""

from __future__ import annotations

from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.peers.round_events import Heard, Send
from gemini_hpc.agent.replicas.voting import ShowDecision, StoreSeal, Voting
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.votes import Decision
from gemini_hpc.wire.peer import DecisionDown

SEALED, BEGUN = Stamp(1, 8), Stamp(1, 9)


def make_voting() -> Voting:
    return Voting("default", RecoveryRounds("n2", "", ("n1", "n2", "n3"), lambda tier: False, fanout=1), 2)


def test_a_seal_is_on_disk_before_others_hear_of_it() -> None:
    voting, decision = make_voting(), DecisionDown(0, "default", SEALED, (), False)
    effects = list(voting.step(Heard("n1", decision)))
    assert effects == [StoreSeal(SEALED), Send("n3", decision), ShowDecision(Decision(SEALED))]
    assert not list(voting.step(Heard("n3", DecisionDown(0, "default", BEGUN, (), False)))), "a child decides nothing"


def test_what_a_root_abandons_that_does_not_know_yet_what_is_sealed_counts() -> None:
    voting = make_voting()
    list(voting.step(Heard("n1", DecisionDown(0, "default", SEALED, (), False))))
    effects = list(voting.step(Heard("n1", DecisionDown(0, "default", None, (SEALED, BEGUN), False))))
    assert effects == [
        Send("n3", DecisionDown(0, "default", SEALED, (BEGUN,), False)),
        ShowDecision(Decision(SEALED, frozenset({BEGUN}))),
    ]
