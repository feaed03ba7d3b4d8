"""Nodes of which agents say that they do harm: when they are drained, against a scripted Slurm."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemini_hpc.config import Settings
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons, read
from gemini_hpc.controller.registry import Stored, Track
from gemini_hpc.controller.sick_nodes import Case, SickNodes, why_not
from gemini_hpc.core.culprits import Cause
from gemini_hpc.slurm import SlurmError
from gemini_hpc.slurm.facts import Job, Node
from gemini_hpc.slurm.text import parse_node
from gemini_hpc.wire.controller import Sick

from .fake_slurm import FakeSlurm
from .scontrol_line import parse_job

LINE = (Path(__file__).parent / "recorded" / "22.05-job-pending.txt").read_text().splitlines()[0]
JOB = dataclasses.replace(parse_job(LINE), state="RUNNING", restarts=1, raw_id=7)
SICK = Sick(7, 1, "n2", 1, 2, Cause.CRASHED, "rank 1 on n2 was killed or crashed")


def node(state: str, name: str = "n2") -> Node:
    return parse_node(f"NodeName={name} NodeAddr={name} CPUTot=4 State={state}")


CASE = Case(
    sick=SICK,
    members=("n1", "n2"),
    job=JOB,
    node=node("ALLOCATED"),
    strangers=frozenset(),
    allowed=4,
    drained=0,
    user_allowed=2,
    user_drained=0,
    guard=True,
)


def test_the_judgement() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"allowed": 0}, "sick_nodes_per_day is 0"),
        ({"job": None}, "does not run there"),
        ({"job": dataclasses.replace(JOB, restarts=2)}, "does not run there"),
        ({"job": dataclasses.replace(JOB, state="PENDING")}, "does not run there"),
        ({"members": ("n1", "n3")}, "not in the job's allocation"),
        ({"members": ("n2",)}, "its program may be the cause"),
        ({"node": None}, "does not know this node"),
        ({"node": node("ALLOCATED+DRAIN")}, "drained already"),
        ({"node": node("DOWN")}, "drained already"),
        ({"strangers": frozenset({5002})}, "jobs of other owners (uid 5002)"),
        ({"strangers": frozenset({5002}), "guard": False}, ""),
        ({"drained": 4}, "4 nodes drained within a day, 4 allowed"),
        ({"user_drained": 2}, "for jobs of this user, 2 allowed"),
    ]
    for case in cases:
        change, why = case
        found = why_not(dataclasses.replace(CASE, **change))
        assert bool(found) == bool(why) and why in found, (case, found)


class Scene(FakeSlurm):
    """Jobs 7 and 8 of two owners on n1 to n4, in their second life."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.drained: dict[str, str] = {}
        self.refuses = False
        self.said: list[tuple[str, str, str]] = []
        self.alerts: list[tuple[str, str]] = []
        self.journal = Journal(str(path / "journal.jsonl"))
        hosts = ["n1", "n2", "n3", "n4"]
        self.tracks = {
            raw_id: Track(Stored(raw_id=raw_id, user_id=uid, allocations={1: hosts}), str(path / f"{raw_id}.job"))
            for raw_id, uid in ((7, 5001), (8, 5002))
        }
        self.sick = SickNodes(
            Settings(**{"node_max_jobs_guard": False, **settings}),
            self,
            self.journal,
            Lemons(str(path), 30),
            lambda raw_id, restart, event, host, detail: self.said.append((event, host, detail)),
            lambda kind, raw_id, host, why: self.alerts.append((kind, host)),
        )

    async def job(self, raw_id: int) -> Job:
        return JOB

    async def nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        return {name: node("MIXED+DRAIN" if name in self.drained else "MIXED", name) for name in names}

    async def owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        return {name: {(5001, 7), (5002, 8)} for name in names}

    async def node_drain(self, name: str, reason: str) -> None:
        if self.refuses:
            raise SlurmError("no")
        self.drained[name] = reason

    def hear(self, *told: tuple[int, str], **more: Any) -> None:
        async def play() -> None:
            for job, host in told:
                fields = {"job": job, "restart": 1, "host": host, "rank": 1, "times": 2, "cause": Cause.CRASHED}
                self.sick.hear(self.tracks[job], Sick(**{**fields, "why": "rank 1", **more}))
            await asyncio.gather(*self.sick._tasks)

        asyncio.run(play())


def test_a_node_is_drained_once_and_it_is_said(tmp_path: Path) -> None:
    scene = Scene(tmp_path, sick_nodes_per_day=8)
    why = 'rank 1 on n2 said "x" Reason=\x1b[1m\u202e'
    scene.hear((7, "n2"), (7, "n2"), why=why)
    scene.hear((7, "n2"), why=why)
    assert scene.drained == {"n2": "gemini-hpc: sick, job 7 restart 1: rank 1 on n2 said ?x? Reason??[1m?"}
    assert [(event, host) for event, host, _ in scene.said] == [("drained", "n2")]
    scene.hear((7, "n9"), (7, "n3"), left=True)
    assert [(event, host) for event, host, _ in scene.said[1:]] == [("not_drained", "n3")], "n9 is not its own"
    assert not scene.alerts
    kept = read(str(tmp_path / "lemons.json"), 0.0)
    assert {name: [(v.what, v.job) for v in visits] for name, visits in kept.items()} == {
        "n2": [("failed", 7)],
        "n3": [("failed", 7)],
    }


def test_the_budget_is_the_journals_and_half_of_it_one_users(tmp_path: Path) -> None:
    scene = Scene(tmp_path, sick_nodes_per_day=3)
    scene.hear((7, "n1"), (7, "n2"), (7, "n3"))
    assert sorted(scene.drained) == ["n1", "n2"] and scene.alerts == [("sick nodes", "n3")]
    scene.journal.close()
    again = Scene(tmp_path, sick_nodes_per_day=3)
    again.hear((8, "n3"), (8, "n4"))
    assert sorted(again.drained) == ["n3"] and again.said[-1][0] == "not_drained"
    assert "3 nodes drained within a day, 3 allowed" in again.said[-1][2]


def test_what_slurm_refuses_is_said(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.refuses = True
    scene.hear((7, "n1"))
    assert not scene.drained and scene.said == [("not_drained", "n1", "rank 1: no")]


def test_a_guarded_site_spares_what_others_use(tmp_path: Path) -> None:
    scene = Scene(tmp_path, node_max_jobs_guard=True)
    scene.hear((7, "n1"))
    assert not scene.drained and "jobs of other owners (uid 5002)" in scene.said[0][2]
