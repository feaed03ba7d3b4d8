"""The file from which a successor goes on: what it says when, and where it cannot be written."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import msgspec
import pytest

from gemini_hpc.agent.daemon import Agent
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.restart_state import NAME, State, StateFile
from gemini_hpc.config import Settings
from gemini_hpc.wire import local, peer

from .conftest import AgentProcess

ATTACH = local.Attach(77, 0, "n1", "n1", 1)
PLAN = peer.PlanDown(1, "", 1, {"n1": 0}, "0", {"n1": 1}, (), ())


def test_a_file_of_an_earlier_version_has_not_heard_go(tmp_path: Path) -> None:
    class Old(msgspec.Struct):
        attach: local.Attach
        plan: peer.PlanDown

    (tmp_path / NAME).write_bytes(msgspec.json.encode(Old(ATTACH, PLAN)))
    assert StateFile(str(tmp_path)).read() == State(ATTACH, PLAN, live=False, begun=0, step="")


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 10000, b"\xff\xfe", b'{"attach":{},"plan":{"round":-1}}'])
def test_what_is_no_state_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)
    assert StateFile(str(tmp_path)).read() is None


class Full(StateFile):
    """Without room for anything new."""

    full = True

    def _put(self, data: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._put(data)


def test_a_full_disk_leaves_what_leads_to_a_new_round_and_nothing_of_an_earlier_incarnation(tmp_path: Path) -> None:
    file = Full(str(tmp_path))
    file.full = False
    assert file.write(State(ATTACH, PLAN, live=True)) and not file.problem
    file.full = True
    newer = msgspec.structs.replace(PLAN, round=2)
    assert not file.write(State(ATTACH, newer)) and "No space left" in file.problem
    assert StateFile(str(tmp_path)).read() == State(ATTACH, PLAN, live=True), "its agent is told of round 2"
    assert not file.write(State(msgspec.structs.replace(ATTACH, restart=1)))
    assert StateFile(str(tmp_path)).read() is None
    file.full = False
    assert file.write_again() and not file.problem
    found = StateFile(str(tmp_path)).read()
    assert found is not None and found.attach.restart == 1 and found.plan is None


def test_an_agent_says_that_it_cannot_write_it_and_when_it_can(agent: AgentProcess) -> None:
    """The directory is the owner's: whatever lies in the way of the file, training is served all the same."""
    from waiting import until

    (agent.directory / f"{NAME}.new").mkdir()
    try:
        trainer = agent.trainer()
        trainer.step()
        until(lambda: "event=unwritten" in agent.log(), 10, what="the agent says that its state is not written")
    finally:
        (agent.directory / f"{NAME}.new").rmdir()
    until(lambda: "event=written" in agent.log(), 10, what="it is")
    trainer.step()
    found = StateFile(str(agent.directory)).read()
    assert found is not None and found.live and found.step == "77.0"


def test_nobody_hears_of_an_incarnation_before_the_file_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the controller either, to which events go as well."""
    said: list[State | None] = []
    file = StateFile(str(tmp_path))

    async def enter() -> None:
        agent = Agent(AgentIdentity(Settings(), 77, os.getuid(), "n1", str(tmp_path)))
        monkeypatch.setattr(agent.controller_link, "register", lambda: said.append(file.read()))
        monkeypatch.setattr(agent.controller_link, "send_event", lambda *_: said.append(file.read()))
        monkeypatch.setattr(agent, "_log", lambda *_, **__: said.append(file.read()))
        await agent.attach(ATTACH)
        agent.trainings.close()

    asyncio.run(enter())
    assert said and all(found is not None and found.attach == ATTACH for found in said)


@pytest.mark.parametrize("left", ["planned", "live", "attached"])
def test_a_successor_goes_on_from_any_point(agent: AgentProcess, left: str) -> None:
    """Alone in its job: whatever its predecessor had written, it comes to a round that serves trainers."""
    from waiting import until

    agent.trainer().step()
    agent.kill()
    state = StateFile(str(agent.directory)).read()
    assert state is not None and state.plan is not None and state.live
    written = {
        "planned": msgspec.structs.replace(state, live=False),
        "live": state,
        "attached": State(state.attach, begun=state.begun),
    }[left]
    StateFile(str(agent.directory)).write(written)
    agent.start(again=True)
    until((agent.directory / "map").exists, 10, what="there is a map")
    reply = agent.caller().hello(rejoin=True)
    if left == "attached":  # a round of its own: who trained in the former one is told so
        assert isinstance(reply, local.Error) and "gone on without" in reply.error, reply
        agent.trainer().step()
    else:
        assert isinstance(reply, local.Welcome), reply
