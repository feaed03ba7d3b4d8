"""The ladder of a requeue that does not start, against a scripted Slurm (no cluster waits two minutes in a test)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.control import probe, rescue
from gemini_hpc.control.decide import Port
from gemini_hpc.control.rescue import Rescue
from gemini_hpc.control.slurm import SlurmError
from gemini_hpc.control.slurm.facts import Job, Node, Reservation, Row
from gemini_hpc.control.slurm.text import parse_node

from .fake_slurm import FakeSlurm
from .scontrol_line import parse_job

LINE = (Path(__file__).parent / "recorded" / "22.05-job-pending.txt").read_text().splitlines()[0]
PENDING = dataclasses.replace(parse_job(LINE), req_nodes=(), restarts=1, start_time=4e9, reason="Resources")


class ScriptedSlurm(FakeSlurm):
    """One pending job that starts only when `starts` says so; every change is noted."""

    def __init__(self, starts: Callable[[ScriptedSlurm], bool] = lambda s: False) -> None:
        self.current = PENDING
        self.starts = starts
        self.done: list[str] = []
        self.held: dict[str, list[str]] = {}

    async def job(self, raw_id: int) -> Job:
        if self.starts(self):
            self.current = dataclasses.replace(self.current, state="RUNNING", nodes=("n1", "n3", "n4"))
        return self.current

    async def nodes(self, names: Any = ()) -> dict[str, Node]:
        base = "CPUTot=4 RealMemory=2000 State=IDLE Partitions=main"
        return {n: parse_node(f"NodeName={n} NodeAddr={n} {base}") for n in ("n1", "n3", "n4", "n5")}

    async def excluded(self, raw_id: int) -> tuple[str, ...]:
        return ()

    async def reservations(self) -> list[Reservation]:
        return [Reservation(k, tuple(v), (), "ACTIVE", frozenset()) for k, v in self.held.items()]

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        if any(set(nodes) & set(v) for v in self.held.values()):
            raise SlurmError("Requested nodes are busy")
        self.held[name] = list(nodes)
        self.done.append(f"reserve {','.join(nodes)}")

    async def delete_reservation(self, name: str) -> bool:
        if self.current.reservation == name:
            return False
        self.held.pop(name, None)
        self.done.append("delete")
        return True

    async def pin(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        self.current = dataclasses.replace(self.current, req_nodes=tuple(nodes), reservation=reservation)
        self.done.append(f"pin {','.join(nodes) or '-'}{' held' if reservation else ''}")
        return self.current

    async def set_start_time(self, job: Job, start: str) -> None:
        self.done.append(f"start {start}")

    async def detach_reservation(self, job: Job, previous: str = "") -> None:
        self.current = dataclasses.replace(self.current, reservation="")
        self.done.append("detach")

    async def attached(self, reservation: str) -> list[Row]:
        return []

    async def nudge(self, job: Job) -> None:
        self.done.append("nudge")


def steer(slurm: ScriptedSlurm, **changes: Any) -> tuple[str, list[str]]:
    said: list[str] = []

    async def work() -> str:
        made = Rescue(
            slurm=slurm,
            raw_id=1,
            restart=0,
            user_id=5001,
            survivors=["n1", "n3"],
            dead=["n2"],
            original=["n3"],
            slurmd_port=6818,
            confirm_s=0.1,
            say=lambda event, host, detail: said.append(f"{event} {host}".strip()),
            note=lambda *a, **k: None,
            **changes,
        )
        await made.reserve(slurm.current, await slurm.nodes(), 3)
        return await made.follow(5.0)

    return asyncio.run(work()), said


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    silent: set[str] = set()

    async def reached(targets: dict[str, tuple[str, int]]) -> dict[str, Port]:
        return {n: Port.SILENT if n in silent else Port.ANSWERS for n in targets}

    monkeypatch.setattr(probe, "reached", reached)
    for name, value in (("PINNED_S", 0.4), ("REACHABLE_S", 0.4), ("HELD_GRACE_S", 0.2), ("SURVEY_S", 0.05)):
        monkeypatch.setattr(rescue, name, value)
    return silent


def test_the_order_of_a_good_requeue() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    outcome, _ = steer(slurm)
    assert outcome == "running"
    assert slurm.done == ["reserve n1,n3,n4,n5", "pin n1,n3 held", "start now+2", "detach", "delete"]
    assert not slurm.held


def test_nothing_is_held_for_ever() -> None:
    slurm = ScriptedSlurm()
    outcome, said = steer(slurm)
    assert outcome == "unpinned" and said[-2:] == ["unpinned", "released"]
    assert slurm.current.req_nodes == ("n3",), "the user's own request is back"
    assert slurm.current.reservation == "" and not slurm.held


def test_a_limit_lets_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescue, "PINNED_S", 60.0)
    slurm = ScriptedSlurm()
    slurm.current = dataclasses.replace(PENDING, reason="QOSMaxJobsPerUserLimit")
    assert steer(slurm)[0] == "held"
    assert not slurm.held


def test_a_survivor_that_dies_is_left_out(quick: set[str]) -> None:
    quick.add("n3")
    fenced: list[str] = []

    async def fence(host: str) -> bool:
        fenced.append(host)
        return True

    slurm = ScriptedSlurm(starts=lambda s: "pin n1 held" in s.done)
    outcome, said = steer(slurm, fence=fence)
    assert outcome == "running" and "survivor_lost n3" in said and fenced == ["n3"]


def test_a_cancelled_job_frees_everything() -> None:
    slurm = ScriptedSlurm()
    slurm.current = dataclasses.replace(PENDING, state="CANCELLED")
    assert steer(slurm)[0] == "CANCELLED"
    assert not slurm.held


def test_an_overlap_with_somebody_elses_reservation_leaves_their_nodes_out() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    slurm.held["weekly"] = ["n4", "n1"]
    assert steer(slurm)[0] == "running"
    assert slurm.done[0] == "reserve n3,n5" and slurm.held == {"weekly": ["n4", "n1"]}


def test_the_jobs_own_reservation_is_kept() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    slurm.current = dataclasses.replace(PENDING, reservation="weekly")
    assert steer(slurm)[0] == "running"
    assert slurm.done == ["pin n1,n3 held", "start now+2"] and slurm.current.reservation == "weekly"
