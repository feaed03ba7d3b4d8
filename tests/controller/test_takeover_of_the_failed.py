"""A script that had ended before its node was set DOWN: a controller that comes up later sends the job back."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest

from gemini_hpc.controller.probe import Look
from gemini_hpc.slurm.facts import Job

from .test_takeover import JOB, KEY, Waiting, make, opened, until


class Failed(Waiting):
    """The job has FAILED, so many seconds ago."""

    def __init__(self, node: str, ago_s: float) -> None:
        super().__init__()
        self.held = {}
        self.all["n2"] = dataclasses.replace(self.all["n2"], state=node)
        self.current = dataclasses.replace(JOB, state="FAILED", nodes=(), end_time=time.time() - ago_s)

    async def requeue(self, job: Job) -> None:
        self.done.append("requeue")
        self.current = dataclasses.replace(job, state="RUNNING", restarts=job.restarts + 1, nodes=("n1", "n3", "n4"))


@pytest.mark.parametrize("noted", [True, False], ids=["the DOWN is noted", "the controller died before it was"])
@pytest.mark.parametrize(
    ("node", "ago_s", "done"),
    [("DOWN", 20.0, ["requeue"]), ("DOWN", 7200.0, []), ("ALLOCATED", 20.0, [])],
    ids=["just now", "long ago", "and the node is not DOWN any more"],
)
def test_it_is_sent_back(
    tmp_path: Path, found: dict[str, Look], noted: bool, node: str, ago_s: float, done: list[str]
) -> None:
    async def work() -> None:
        slurm = Failed(node, ago_s)
        home = make(tmp_path, slurm)
        opened(home)
        home.journal.write(KEY, "down", "before", node="n2", user_id=JOB.user_id)
        if noted:
            home.journal.write(KEY, "down", "after", node="n2")
        await home.resume()
        await until(lambda: not home.active(JOB.raw_id))
        home.cancel()
        assert slurm.done == done
        assert not slurm.held and not home.journal.left_open()

    asyncio.run(work())
