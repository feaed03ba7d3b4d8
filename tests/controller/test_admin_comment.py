"""The line in a job's AdminComment at its end: what it says, when it is written, and what it never replaces."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.controller.event_log import EventLogs
from gemini_hpc.controller.gate import Gate, GatedSlurm
from gemini_hpc.controller.job_watch import JobWatch
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.primary import Primary
from gemini_hpc.controller.recoveries import Recoveries
from gemini_hpc.controller.registry import Registry
from gemini_hpc.query.summary_line import PREFIX, build_summary_line
from gemini_hpc.slurm import Slurm, SlurmError, SlurmRefused, SlurmUnreachable
from gemini_hpc.slurm import client as slurm_client
from gemini_hpc.slurm.facts import Job, WatchedJob
from gemini_hpc.wire.inspect_schema import EventRecord

from .fake_slurm import FakeSlurm
from .scontrol_line import parse_job

LINE = (Path(__file__).parent / "recorded" / "22.05-job-running.txt").read_text().splitlines()[0]
JOB = parse_job(LINE)
OURS = "gemini-hpc: no step was saved"


def event(t: float, name: str, host: str = "", restart: int = 0, version: int = 0, **detail: Any) -> EventRecord:
    return EventRecord(t, name, host, restart, version, json.dumps(detail) if detail else "")


LOST = [
    event(10, "detected", "n1"),
    event(11, "confirmed", "n2"),
    event(11, "confirmed", "n2"),  # found again by a controller that took over
    event(12, "down", "n2"),
    event(15, "running", "", 1),
    event(16, "resumed", "n1", 1, 47, rank=0, repeated=2),
    event(16, "resumed", "n4", 1, 47, rank=1, repeated=2),
    event(18, "first_iteration", "n1", 1, 48),
    event(30, "released", "n1", 1, 90),
]


@pytest.mark.parametrize(
    ("events", "how", "line"),
    [
        ([], (0, 0, 0), "no step was saved"),
        ([event(9, "detached", "n1", 0, 90)], (2, 0, 3), "2 copies on 3 nodes; last saved step 90"),
        (
            LOST,
            (2, 0, 3),
            "2 copies on 3 nodes; last saved step 90; 1 node lost; 1 recovery in 8 s; 2 steps repeated",
        ),
        (
            [event(5, "relaunch", "n1"), event(6, "resumed", "n1", 0, 8, rank=0, repeated=1)],
            (4, 1, 4),
            "parity in groups of 4 on 4 nodes; last saved step 8; ranks restarted 1 time; 1 step repeated",
        ),
    ],
)
def test_the_line(events: list[EventRecord], how: tuple[int, int, int], line: str) -> None:
    assert build_summary_line(events, *how) == PREFIX + line


def test_nothing_of_a_users_text_gets_in_and_the_line_is_short() -> None:
    """An agent is its owner's: it may say anything, and as often as it likes."""
    bad = [
        event(1, "resumed", 'n1" JobId=5', 0, 1 << 39, rank=0, repeated=10**30),
        EventRecord(1, "resumed", "n1", 0, 1, "not json"),
        event(1, "resumed", "n1", 0, 1, rank=0, repeated=-5),
        event(1, "resumed", "n1", 0, 1, rank="0", repeated="x"),
        *(event(2, "confirmed", f"x{number}\n", number) for number in range(5000)),
        *(event(3, "relaunch", "$(reboot)") for _ in range(5000)),
    ]
    line = build_summary_line(bad, 1 << 20, 0, 1 << 20)
    assert len(line) < 200 and slurm_client._SAFE_LINE.fullmatch(line), line


class Ending(FakeSlurm):
    """A job that runs and ends."""

    def __init__(self, refuses: bool = False) -> None:
        self.current, self.refuses, self.noted = JOB, refuses, list[str]()

    async def read_job(self, raw_id: int) -> Job:
        return self.current

    async def read_rows(self, raw_ids: Sequence[int]) -> dict[int, WatchedJob]:
        return {JOB.raw_id: WatchedJob(JOB.raw_id, self.current.state, JOB.user_id, self.current.nodes)}

    async def note_end(self, job: Job, line: str, prefix: str) -> None:
        self.noted.append(f"{job.state} {line}")
        if self.refuses:
            raise SlurmRefused("Access/permission denied")


@pytest.mark.parametrize("refuses", [False, True])
def test_each_end_is_noted_once(tmp_path: Path, refuses: bool) -> None:
    """A controller that was started anew adds no second line; a refusal ends nothing."""
    slurm, settings = Ending(refuses), Settings(state_dir=str(tmp_path))

    def watcher(known: Registry) -> JobWatch:
        logs = EventLogs(str(tmp_path / "jobs"))
        logs.claim_log(JOB.raw_id, JOB.user_id)
        journal, lemons = Journal(str(tmp_path / "journal")), Lemons(str(tmp_path), 0)
        return JobWatch(Recoveries(settings, slurm, journal, logs, known, Primary(slurm), lemons))

    async def work(watch: JobWatch, state: str) -> None:
        slurm.current = dataclasses.replace(JOB, state=state)
        for _ in range(3):
            await watch.poll_jobs()

    known = Registry(str(tmp_path / "jobs"))
    known.track_job(JOB).write_entry()
    for state in ("PENDING", "FAILED"):
        asyncio.run(work(watcher(known), state))
    for state in ("FAILED", "PENDING", "COMPLETED"):
        asyncio.run(work(watcher(Registry(str(tmp_path / "jobs"))), state))
    assert [note.split()[0] for note in slurm.noted] == ["FAILED", "COMPLETED"]
    assert all(OURS in note for note in slurm.noted)


class Ended(Ending):
    """Three jobs that have ended. slurmdbd does not answer."""

    async def read_job(self, raw_id: int) -> Job:
        return dataclasses.replace(JOB, raw_id=raw_id, state="COMPLETED")

    async def read_rows(self, raw_ids: Sequence[int]) -> dict[int, WatchedJob]:
        return {i: WatchedJob(i, "COMPLETED", JOB.user_id, JOB.nodes) for i in raw_ids}

    async def note_end(self, job: Job, line: str, prefix: str) -> None:
        self.noted.append(f"{job.raw_id}")
        raise SlurmUnreachable("sacct gave no answer within 10 s")


def test_an_accounting_that_does_not_answer_is_awaited_once_for_all_jobs(tmp_path: Path) -> None:
    slurm, settings, known = Ended(), Settings(state_dir=str(tmp_path)), Registry(str(tmp_path / "jobs"))
    logs = EventLogs(str(tmp_path / "jobs"))
    journal, lemons = Journal(str(tmp_path / "journal")), Lemons(str(tmp_path), 0)
    for raw_id in (JOB.raw_id, JOB.raw_id + 1, JOB.raw_id + 2):
        known.track_job(dataclasses.replace(JOB, raw_id=raw_id)).write_entry()
        logs.claim_log(raw_id, JOB.user_id)
    recoveries = Recoveries(settings, slurm, journal, logs, known, Primary(slurm), lemons)
    asyncio.run(JobWatch(recoveries).poll_jobs())
    assert len(slurm.noted) == 1
    ended = [any(e.name == "ended" for e in logs.read_events(i, JOB.user_id)) for i in known.jobs]
    assert ended == [True] * 3, "all ends are known all the same"


def test_a_controller_that_only_observes_writes_nothing(tmp_path: Path) -> None:
    slurm = Ending()
    gated = GatedSlurm(slurm, Gate(Settings(state_dir=str(tmp_path), mode="observe")))
    with pytest.raises(SlurmError, match=r"an AdminComment of job .* is withheld"):
        asyncio.run(gated.note_end(JOB, OURS, PREFIX))
    assert not slurm.noted


TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >>{log}
case "$(basename "$0")" in sacct) echo '{found}' ;; esac
"""


@pytest.mark.parametrize(
    ("keeps_accounts", "found", "written"),
    [
        (False, "", False),
        (True, "", True),
        (True, "gemini-hpc: held: its nodes are lost each time", True),
        (True, "JS1:H4sIAAAA", False),
        (True, "gemini is a constellation", False),
    ],
)
def test_another_programs_comment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_accounts: bool, found: str, written: bool
) -> None:
    log = tmp_path / "log"
    log.touch()
    for tool in ("scontrol", "sacct", "sacctmgr"):
        path = tmp_path / tool
        path.write_text(TOOL.format(log=log, found=found))
        path.chmod(0o755)

    async def accounting(self: Slurm) -> bool:
        return keeps_accounts

    monkeypatch.setattr(slurm_client, "find_tool", lambda name: os.fspath(tmp_path / name))
    monkeypatch.setattr(Slurm, "has_accounting", accounting)
    asyncio.run(Slurm().note_end(dataclasses.replace(JOB, state="COMPLETED"), OURS, PREFIX))
    changes = [line for line in log.read_text().splitlines() if line.startswith(("scontrol", "sacctmgr"))]
    wanted = f"sacctmgr -i modify job where jobid={JOB.raw_id} set AdminComment={OURS}"
    assert changes == [wanted] * written


@pytest.mark.parametrize("line", ["", "a\nb", 'a"b', "a'b", "a=b", "x" * 301, "$(x)"])
def test_only_a_plain_line_is_written(line: str) -> None:
    with pytest.raises(SlurmError, match="is not an AdminComment"):
        asyncio.run(Slurm().note_end(JOB, line, PREFIX))
