"""A script that had ended before its node was set DOWN: a controller that comes up later sends the job back."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.controller import recoveries
from gemini_hpc.controller.probe import ProbeResult
from gemini_hpc.controller.registry import ConnectedAgent
from gemini_hpc.slurm.facts import Job
from gemini_hpc.wire.controller import Registration

from .test_takeover import JOB, KEY, Waiting, make, opened, until


class Failed(Waiting):
    """The job has FAILED, or is COMPLETED, so many seconds ago."""

    def __init__(self, node: str, ago_s: float, state: str = "FAILED") -> None:
        super().__init__()
        self.held = {}
        self.all["n2"] = dataclasses.replace(self.all["n2"], state=node)
        self.current = dataclasses.replace(JOB, state=state, nodes=(), end_time=time.time() - ago_s)

    async def requeue_job(self, job: Job) -> None:
        self.done.append("requeue")
        self.current = dataclasses.replace(job, state="RUNNING", restarts=job.restarts + 1, nodes=("n1", "n3", "n4"))


@pytest.mark.parametrize("noted", [True, False], ids=["the DOWN is noted", "the controller died before it was"])
@pytest.mark.parametrize(
    ("node", "ago_s", "done"),
    [("DOWN", 20.0, ["requeue"]), ("DOWN", 7200.0, []), ("ALLOCATED", 20.0, [])],
    ids=["just now", "long ago", "and the node is not DOWN any more"],
)
def test_it_is_sent_back(
    tmp_path: Path, found: dict[str, ProbeResult], noted: bool, node: str, ago_s: float, done: list[str]
) -> None:
    async def work() -> None:
        slurm = Failed(node, ago_s)
        home = make(tmp_path, slurm)
        opened(home)
        home.journal.write_line(KEY, "down", "before", node="n2", user_id=JOB.user_id)
        if noted:
            home.journal.write_line(KEY, "down", "after", node="n2")
        await home.resume_open()
        await until(lambda: not home.is_active(JOB.raw_id))
        home.cancel()
        assert slurm.done == done
        assert not slurm.held and not home.journal.read_open()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("word", "done"),
    [(False, ["requeue"]), (True, []), (None, [])],
    ids=["its training had not finished", "it had", "no agent calls"],
)
def test_one_that_is_completed_is_sent_back_on_its_agents_word(
    tmp_path: Path, found: dict[str, ProbeResult], monkeypatch: pytest.MonkeyPatch, word: bool | None, done: list[str]
) -> None:
    monkeypatch.setattr(recoveries, "SPEAK_S", 0.6)

    async def work() -> None:
        slurm = Failed("DOWN", 20.0, "COMPLETED")
        home = make(tmp_path, slurm)
        opened(home)
        home.journal.write_line(KEY, "down", "before", node="n2", user_id=JOB.user_id)
        await home.resume_open()
        await asyncio.sleep(0.1)
        if word is not None:  # it calls a moment after the controller has begun
            link: Any = SimpleNamespace(closed=False, last_heard=0.0, send=lambda message: None)
            agent = home.registry.jobs[JOB.raw_id].agents["n1"] = ConnectedAgent(link, "n1", JOB.raw_id, "x")
            agent.apply_registration(Registration(JOB.raw_id, 0, "n1", (), 2, 17000, "x", "detached", finished=word))
        await until(lambda: not home.is_active(JOB.raw_id))
        home.cancel()
        assert slurm.done == done and not slurm.held and not home.journal.read_open()

    asyncio.run(work())
