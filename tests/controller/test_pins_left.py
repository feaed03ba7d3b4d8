"""Pins that a survivor's epilog has left, as no controller was there: what one that comes up makes of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.controller import registry
from gemini_hpc.controller.event_log import EventLogs
from gemini_hpc.controller.job_watch import JobWatch
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.primary import Primary
from gemini_hpc.controller.recoveries import Recoveries
from gemini_hpc.controller.registry import Registry
from gemini_hpc.slurm.facts import Job, WatchedJob

from .fake_slurm import FakeSlurm
from .scontrol_line import parse_job

RECORDED = Path(__file__).parent / "recorded"
LINE = (RECORDED / "22.05-job-running.txt").read_text().splitlines()[0]
FIRST = dataclasses.replace(parse_job(LINE), nodes=("n1", "n2", "n3"), req_nodes=("n2",), reservation="")
HELD = f"gemini_{FIRST.raw_id}_0123456789ab"


def again(*nodes: str, reservation: str = "") -> Job:
    """The same job, on its way back."""
    return dataclasses.replace(FIRST, state="PENDING", restarts=1, nodes=(), req_nodes=nodes, reservation=reservation)


class Waits(FakeSlurm):
    """One job that waits; what is changed is noted."""

    def __init__(self, job: Job) -> None:
        self.current, self.done = job, list[str]()

    async def read_job(self, raw_id: int) -> Job:
        return self.current

    async def read_rows(self, raw_ids: Sequence[int]) -> dict[int, WatchedJob]:
        return {FIRST.raw_id: WatchedJob(FIRST.raw_id, self.current.state, FIRST.user_id, self.current.nodes)}

    async def pin_job(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        self.done.append(f"pin {','.join(nodes)} in {reservation or 'none'}")
        self.current = dataclasses.replace(self.current, req_nodes=tuple(nodes), reservation=reservation)
        return self.current

    async def delete_reservation(self, name: str) -> bool:
        self.done.append(f"delete {name}")
        return True


def watched(path: Path, slurm: Waits, wait_s: float, first: Job | None = FIRST) -> list[str]:
    """What the watcher changes in some rounds after `wait_s`; `first`: what the controller had seen before."""
    known = Registry(str(path / "jobs"))
    track = known.track_job(first or slurm.current)
    if first is not None:
        track.write_entry()
        known = Registry(str(path / "jobs"))  # it was started anew since
    settings = Settings(state_dir=str(path))
    logs, journal = EventLogs(str(path / "jobs")), Journal(str(path / "journal"))
    home = Recoveries(settings, slurm, journal, logs, known, Primary(slurm), Lemons(str(path), 0))
    watcher = JobWatch(home)

    async def work() -> None:
        for pause_s in (0.0, wait_s, 0.0, 0.0):
            await asyncio.sleep(pause_s)
            await watcher.poll_jobs()

    asyncio.run(work())
    return slurm.done


@pytest.fixture(autouse=True)
def minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HOLD_S", 0.2)


@pytest.mark.parametrize(
    ("job", "done"),
    [
        (again("n1", "n3"), ["pin n2 in none"]),
        (again("n2", reservation=HELD), ["pin n2 in none", f"delete {HELD}"]),
        (again("n1", "n3", reservation=HELD), ["pin n2 in none", f"delete {HELD}"]),
        (again("n2"), []),
        (again("n1", "n9"), []),  # not nodes that it had: its owner's wish
        (again("n2", reservation="gemini_77_0123456789ab"), []),
    ],
)
def test_a_pin_of_an_epilogs_hold_is_taken_off(tmp_path: Path, job: Job, done: list[str]) -> None:
    assert watched(tmp_path, Waits(job), 0.3) == done


def test_not_while_the_hold_may_still_be_at_work(tmp_path: Path) -> None:
    assert watched(tmp_path, Waits(again("n1", "n3", reservation=HELD)), 0.05) == []


def test_a_request_that_may_be_the_users_own_is_left(tmp_path: Path) -> None:
    """Who has first seen the job in a later incarnation does not know what its owner asked for."""
    later = dataclasses.replace(FIRST, restarts=1)
    job = dataclasses.replace(again("n1", "n3"), restarts=2)
    assert watched(tmp_path, Waits(job), 0.3, first=later) == []
