"""What an agent does when its job's script has ended with 0: whether it frees the copies, or waits for a word."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gemini_hpc.agent.daemon import Agent
from gemini_hpc.config import Settings
from gemini_hpc.wire import local


@pytest.mark.parametrize(
    ("closed", "doubt", "state"),
    [(True, "", "released"), (False, "", "detached"), (True, "silent", "detached"), (True, "dead", "hold")],
)
def test_copies_are_freed_only_where_the_training_has_finished_and_nobody_is_missed(
    tmp_path: Path, closed: bool, doubt: str, state: str
) -> None:
    async def work() -> None:
        agent = Agent(Settings(), job=77, uid=os.getuid(), node="n1", directory=str(tmp_path), again=False)
        await agent.attach(local.Attach(77, 0, "n1", "n1", 1))
        training = agent.trainings.named("default")
        training.greeted.add(0)
        if closed:
            training.finished.add(0)
        assert agent.finished is closed and agent.membership.incarnation is not None
        detector = agent.membership.incarnation.mesh.detector
        (detector.dead if doubt == "dead" else detector.suspects).update(["n2"] if doubt else [])
        reply = agent._epilog(local.Epilog(77, 0, "0"))
        assert isinstance(reply, local.Ok) and reply.state == state
        assert agent._retention.over.is_set() is (state == "released")
        agent.membership.incarnation.close()
        agent.trainings.close()

    asyncio.run(work())
