"""What the controller answers, and to whom, when Slurm is slow and when job ids are given anew."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.controller import query_server
from gemini_hpc.controller.event_log import EventLogs
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.primary import Primary
from gemini_hpc.controller.query_server import STALE, QueryServer
from gemini_hpc.controller.registry import Registry
from gemini_hpc.controller.server import Controller
from gemini_hpc.slurm.errors import UnknownJob
from gemini_hpc.slurm.facts import Job
from gemini_hpc.wire.inspect_schema import EventRecord, JobAnswer

from .fake_slurm import FakeSlurm
from .test_takeover import JOB

ALICES = dataclasses.replace(JOB, raw_id=7, user_id=5001)
BOBS = dataclasses.replace(JOB, raw_id=7, user_id=5002, nodes=("n8",))


class Nobody:
    """Has no operators."""

    async def allows(self, uid: int) -> bool:
        return False


def answer(path: Path, read: Callable[[int], Awaitable[Job]], uid: int) -> tuple[JobAnswer, Registry]:
    """To this user about job 7, which the controller knows for alice's."""
    registry, logs = Registry(str(path)), EventLogs(str(path))
    registry.track_job(ALICES)
    logs.claim_log(7, 5001)
    logs.append_events(7, [EventRecord(time.time(), "degraded", "n1", 0, 0, "a secret")])
    operators: Any = Nobody()

    async def ask() -> JobAnswer:
        return await QueryServer(operators, registry, logs, Lemons(str(path), 0), read)._answer(7, uid)

    return asyncio.run(ask()), registry


def test_a_slow_slurm_does_not_hold_the_answer_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who asks waits for 2 s, and would take the controller for gone."""
    monkeypatch.setattr(query_server, "SLURM_TIMEOUT_S", 0.1)

    async def slow(raw_id: int) -> Job:
        await asyncio.sleep(30)
        raise AssertionError

    began = time.monotonic()
    found, _ = answer(tmp_path, slow, 5001)
    assert time.monotonic() - began < 5
    assert found.slurm["state"] == ALICES.state and STALE in found.slurm["note"] and found.events
    assert "job=7 slurm=slurmctld has not answered about this job within 0.1 s" in caplog.text


def test_jobs_counts_what_came_back_and_tells_of_what_was_sealed(tmp_path: Path) -> None:
    """Of a suspicion that was dismissed, and of a job that has never sealed, the list says nothing."""
    registry, logs, now = Registry(str(tmp_path)), EventLogs(str(tmp_path)), time.time()
    registry.track_job(ALICES)
    suspected = [("n1", "detected", "n2 is silent; witnesses n1"), ("n2", "detected", ""), ("n2", "dismissed", "")]
    lost = [("n2", "detected", ""), ("n2", "confirmed", ""), ("", "running", "restart 1 on n1")]
    for job, told, sealed in ((7, [*suspected, *lost], 40), (8, suspected, 0)):
        logs.claim_log(job, 5001)
        ends = [("n1", "detached", "exit code 1")]
        logs.append_events(
            job, [EventRecord(now, name, host, 0, sealed, text) for host, name, text in [*told, *ends]]
        )
    operators: Any = Nobody()
    asked: Any = None
    answers = asyncio.run(
        QueryServer(operators, registry, logs, Lemons(str(tmp_path), 0), asked)._list_jobs(False, 5001)
    )
    assert [(row.job, row.recoveries, row.sealed) for row in answers.jobs] == [(7, 1, 40), (8, 0, 0)]


def test_a_job_with_the_number_of_another_owners_is_not_his(tmp_path: Path) -> None:
    """Slurm counts anew after a cold start, and alice's agents are there still."""

    async def read(raw_id: int) -> Job:
        return BOBS

    found, registry = answer(tmp_path, read, 5002)
    assert not found.parts and not found.events and found.slurm["nodes"] == "n8"
    assert "n8" not in registry.jobs[7].list_hosts()
    assert answer(tmp_path, read, 5001)[0].error, "and alice's is over"


def test_a_read_that_fails_when_nobody_waits_any_more_is_no_fault(tmp_path: Path) -> None:
    """An agent registers for a job that has ended, and closes before Slurm has said so."""
    answered, complaints = asyncio.Event(), list[Any]()

    class Slow(FakeSlurm):
        async def read_job(self, raw_id: int) -> Job:
            await answered.wait()
            raise UnknownJob("Invalid job id specified")

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        slurm = Slow()
        (tmp_path / "run").mkdir()
        controller = Controller(Settings(state_dir=str(tmp_path)), slurm, Primary(slurm), str(tmp_path / "run"))
        asked = asyncio.create_task(controller.read_job(7))
        await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])
        answered.set()
        await asyncio.sleep(0.01)
        controller._reads.clear()
        gc.collect()

    asyncio.run(work())
    assert not complaints
