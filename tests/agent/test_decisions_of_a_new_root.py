"""A root that has been started again does not know at once what is sealed."""

from __future__ import annotations

from gemini_hpc.agent.replicas.voting import Voting
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.votes import Decision

SEALED, BEGUN = Stamp(1, 8), Stamp(1, 9)


def test_what_a_root_abandons_that_does_not_know_yet_what_is_sealed_counts() -> None:
    told: list[Decision] = []
    sealing = Voting(2, ("below",), lambda _: None, lambda word, degraded: told.append(word))
    sealing.on_decision(Decision(SEALED), False)
    sealing.on_decision(Decision(None, frozenset({SEALED, BEGUN})), False)
    assert sealing.decision == Decision(SEALED, frozenset({BEGUN})) == told[-1]
