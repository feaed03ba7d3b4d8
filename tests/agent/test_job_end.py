"""What an agent does when its job's script has ended with 0: whether it frees the copies, or waits for a word."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gemini_hpc import clock
from gemini_hpc.agent.daemon import Agent
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.tier.keeps import NamedVersions
from gemini_hpc.agent.tier.saver import Saver
from gemini_hpc.config import Settings
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import local


async def attached(directory: Path, *, closed: bool) -> tuple[Agent, Mesh]:
    """An agent whose job runs, and its links; closed: all ranks have closed their checkpointers."""
    agent = Agent(AgentIdentity(Settings(), 77, os.getuid(), "n1", str(directory)))
    await agent.attach(local.Attach(77, 0, "n1", "n1", 1))
    training = agent.trainings.get_or_create("default")
    training.greeted.add(0)
    if closed:
        training.finished.add(0)
    assert agent.finished is closed and agent.membership.incarnation is not None
    return agent, agent.membership.incarnation.mesh


@pytest.mark.parametrize(
    ("closed", "doubt", "state"),
    [(True, "", "released"), (False, "", "detached"), (True, "silent", "detached"), (True, "dead", "hold")],
)
def test_copies_are_freed_only_where_the_training_has_finished_and_nobody_is_missed(
    tmp_path: Path, closed: bool, doubt: str, state: str
) -> None:
    async def work() -> None:
        agent, mesh = await attached(tmp_path, closed=closed)
        (mesh.detector.dead if doubt == "dead" else mesh.detector.suspects).update(["n2"] if doubt else [])
        reply = agent._on_epilog(local.Epilog(77, 0, "0"))
        assert isinstance(reply, local.Ok) and reply.state == state
        assert agent._retention.over.is_set() is (state == "released")
        mesh.close()
        agent.trainings.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("closed", "meanwhile", "freed"),
    [
        (True, ["left"], True),
        (True, ["heard"], True),
        (True, [], False),
        (True, ["dead"], False),
        (True, ["dead", "heard"], False),
        (True, ["pending", "heard"], False),
        (True, ["nobody watches", "left"], False),
        (True, ["to be kept by name", "left"], False),
        (False, ["left"], False),
    ],
)
def test_who_was_silent_at_the_end_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool, meanwhile: list[str], freed: bool
) -> None:
    """A node that counts as dead was lost before the end or after it, so the job may come back."""

    async def work() -> None:
        agent, mesh = await attached(tmp_path, closed=closed)
        mesh.detector.last_heard["n2"] = clock.monotonic()
        mesh.detector.suspects.add("n2")
        reply = agent._on_epilog(local.Epilog(77, 0, "0"))
        assert isinstance(reply, local.Ok) and reply.state == "detached"
        for what in meanwhile:
            agent._good_end.check_doubt()
            assert not agent._retention.over.is_set()
            if what == "left":
                mesh.detector.record_leave("n2")
            elif what == "heard":
                mesh.detector.suspects.clear()
                mesh.detector.record_message("n2", clock.monotonic())
            elif what == "dead":
                mesh.detector.dead.add("n2")
            elif what == "pending":
                agent.on_job_pending()
            elif what == "nobody watches":
                mesh.detector.watching = False
            else:
                monkeypatch.setattr(Training, "sealed", Stamp(1, 1))
                monkeypatch.setattr(Saver, "tier", str(tmp_path))
                monkeypatch.setattr(NamedVersions, "list_wished_names", lambda keeps, name: ("best",))
        agent._good_end.check_doubt()
        assert agent._retention.over.is_set() is freed
        assert ("n1" in mesh.left) is freed, "the others are told, where all is freed"
        mesh.close()
        agent.trainings.close()

    asyncio.run(work())
