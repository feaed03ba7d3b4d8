"""Reports of what becomes of a version, while the agent is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.client.agent_connection import AgentClient
from gemini_hpc.client.session import RankSession
from gemini_hpc.mpi.calls import Call, Calls
from gemini_hpc.train.planning import Planning
from gemini_hpc.train.state.tree import StateDictError
from gemini_hpc.train.versions import Versions


@pytest.fixture
def session() -> RankSession:
    """Return a session at version 7 whose agent is missing."""
    ranks: Any = SimpleNamespace(rank=1, world=2, subject="training")
    tier: Any = None
    session = RankSession(ranks, "default", tier, seal_timeout_s=1.0)
    session.client = AgentClient("/none", lambda welcome, exchange: True, lambda: None)
    session.version, session.write_line = 7, lambda text: None
    assert session.client.lost
    return session


def kept(session: RankSession) -> list[tuple[str, int, str]]:
    assert session.client is not None
    return [(event.name, event.version, event.detail) for event in session.client._events]


def test_a_version_without_an_objects_state_is_reported_to_the_next_agent(session: RankSession) -> None:
    planning: Any = SimpleNamespace(_session=session, _reported=set())
    Planning.skip_without_state(planning, StateDictError("no state"))
    assert kept(session) == [("skipped", 7, "rank 1: no state")]


def test_a_version_that_does_not_fit_the_plan_is_reported_to_the_next_agent(session: RankSession) -> None:
    planning = SimpleNamespace(request_plan=lambda *_, agrees: None, record_mismatches=lambda names: False)
    versions: Any = SimpleNamespace(
        _session=session, _engine=SimpleNamespace(planning=planning), _gate=SimpleNamespace()
    )
    controller: Any = SimpleNamespace(agrees=True)
    Versions._skip_mismatched(versions, controller, {"w": "w has another shape"})
    assert kept(session) == [("skipped", 7, "rank 1: w has another shape")]


def test_a_version_on_which_ranks_differ_is_reported_to_the_next_agent(session: RankSession) -> None:
    ranks: Any = None
    assert Calls(ranks, session).report_difference([Call("step()", 7), Call("step()", 6)])
    ((name, version, detail),) = kept(session)
    assert (name, version) == ("void", 7) and detail.startswith("rank 1: rank 0 is in step(), with 7 step() calls")


def test_what_concerns_no_version_is_dropped(session: RankSession) -> None:
    session.record_event("planned", "new tensors")
    assert not kept(session)
