"""A rank that says that it is not protected is believed: nothing waits for it, and everybody is told."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from gemini_hpc.agent.inspect_part import InspectView
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.voting import Voting
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.votes import Decision
from gemini_hpc.query.inspect_document import build_inspect_document
from gemini_hpc.wire import control_page, local
from gemini_hpc.wire.inspect_schema import InspectPart, TrainingState

from .conftest import JOB, STEP, AgentProcess
from .contexts import made_context


def state(training: Training) -> TrainingState:
    silent: Any = SimpleNamespace(
        list_summaries=lambda *_: (),
        build_state=lambda *_: None,
        describe_saves=lambda *_: None,
        list_sentences=lambda _: (),
        problem="",
    )
    nothing: Any = SimpleNamespace(taken_bytes=0, cap_bytes=0, events=())
    replicas: Any = SimpleNamespace(trainings=[training], store=Store(nothing), rejections=silent)
    made = InspectView(
        made_context(Membership(), job=JOB),
        replicas,
        silent,
        silent,
        silent,
        silent,
        SimpleNamespace(state=""),  # type: ignore[arg-type]
        list_live_ranks=lambda name: (),
    )
    return made.build_part(1, 0.0).trainings[0]


def sealed(training: Training, version: int) -> None:
    training.page.set_state(control_page.STATE_PROTECTED)
    training.sealing = Voting("default", RecoveryRounds("n1", "", ("n1",), lambda tier: False), 1)
    training.sealing.decision = Decision(Stamp(1, version))


def part(training: Training, **more: Any) -> InspectPart:
    places = {"n1": 0}
    return InspectPart(
        "n1", JOB, 0, 0, 1, 1, 1, "live", ("n1",), places, "", "", 1, 0, 0, (state(training),), (), (), (), (), **more
    )


def test_what_a_rank_says_of_its_protection_is_the_state_of_the_set() -> None:
    training = Training("default")
    try:
        sealed(training, 11)
        assert state(training).state == "protected"
        training.record_trouble("rank 0: version 13 cannot be sealed without rank 1's copy")
        assert (state(training).state, "without rank 1's copy" in state(training).note) == ("degraded", True)
        document = build_inspect_document(
            JOB, [part(training)], [], {"nodes": "n1", "state": "RUNNING"}, (), "agents", time.time()
        )
        assert any("without rank 1's copy" in note for note in document["trainings"][0]["notes"])
        sealed(training, 14)
        assert state(training).state == "protected", "a newer version is sealed"
        training.left[1] = "IndexError: no room"
        assert (
            state(training).state == "degraded"
            and "rank 1 is no longer protected: IndexError" in state(training).note
        )
        training.apply_plan(None, 2)
        assert state(training).state == "arming" and not state(training).note
    finally:
        training.close()


def test_a_round_that_does_not_end_is_the_state_of_the_job() -> None:
    training = Training("default")
    try:
        why = "recovery round 3 waits for the acknowledgement of n2"
        document = build_inspect_document(
            JOB, [part(training, unprotected=why)], [], {"nodes": "n1", "state": "RUNNING"}, (), "agents", time.time()
        )
        assert document["state"] == "unprotected" and f"unprotected, because n1's {why}" in document["notes"]
    finally:
        training.close()


def test_what_a_rank_was_filling_that_gives_up_is_void_and_it_begins_nothing(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    trainer.step()
    begun = trainer.caller.ask(local.BeginVersion("default", 0, 2))
    assert isinstance(begun, local.Begun)
    assert trainer.caller.ask(local.Event("unprotected", 2, time.time(), "IndexError: no room")) == local.Ok()
    landed = trainer.caller.ask(local.Landed("default", 0, 2, begun.slot, 10, "0" * 32))
    assert isinstance(landed, local.Error) and "is not being filled" in landed.error
    refused = trainer.caller.ask(local.BeginVersion("default", 0, 3))
    assert isinstance(refused, local.Refused) and "no longer protected" in refused.reason
    trainer.caller.close()
    back = agent.caller()
    assert isinstance(back.hello(step=STEP), local.Welcome), "a process that begins anew counts again"
