"""Nodes that root has found red: when they are drained, against a scripted Slurm."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gemini_hpc.config import Settings
from gemini_hpc.controller.gate import Gate
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons, read_visits
from gemini_hpc.controller.sick_nodes import RedNodeCase, SickNodeDrains, explain_refusal
from gemini_hpc.controller.withheld import Withheld
from gemini_hpc.slurm import SlurmRefused
from gemini_hpc.slurm.facts import Node
from gemini_hpc.slurm.text import parse_node
from gemini_hpc.wire.controller import HealthVerdict, RedNode

from .fake_slurm import FakeSlurm


def node(state: str, name: str = "n2") -> Node:
    return parse_node(f"NodeName={name} NodeAddr={name} CPUTot=4 State={state}")


CASE = RedNodeCase(node=node("ALLOCATED"), allowed=4, drained=0)


def test_the_judgement() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"allowed": 0}, "sick_nodes_per_day is 0"),
        ({"node": None}, "does not know this node"),
        ({"node": node("ALLOCATED+DRAIN")}, "drained already"),
        ({"node": node("DOWN")}, "drained already"),
        ({"drained": 4}, "4 nodes drained within a day, 4 allowed"),
    ]
    for case in cases:
        change, why = case
        found = explain_refusal(dataclasses.replace(CASE, **change))
        assert bool(found) == bool(why) and why in found, (case, found)


def test_a_site_that_observes_drains_nothing_and_keeps_its_budget(tmp_path: Path) -> None:
    scene = Scene(tmp_path, mode="observe", sick_nodes_per_day=1)
    assert scene.judge("n1") == ['not drained: mode = "observe"']
    assert scene.judge("n2") == ["not drained: 1 nodes drained within a day, 1 allowed"], "as if n1 were drained"
    assert not scene.drained and [act.node for act in scene.withheld.acts] == ["n1"]


class Scene(FakeSlurm):
    """Nodes n1 to n4."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.drained: dict[str, str] = {}
        self.refuses = False
        self.said: list[tuple[str, str, str]] = []
        self.alerts: list[tuple[str, str]] = []
        self.journal = Journal(str(path / "journal.jsonl"))
        self.withheld = Withheld(str(path), lambda *said: None)
        home = SimpleNamespace(
            settings=Settings(**settings),
            slurm=self,
            journal=self.journal,
            lemons=Lemons(str(path), 30),
            gate=Gate(Settings(**settings)),
            withheld=self.withheld,
            log_event=lambda raw_id, restart, event, host, detail: self.said.append((event, host, detail)),
            alerts=SimpleNamespace(send_alert=lambda kind, raw_id, host, why: self.alerts.append((kind, host))),
        )
        self.sick = SickNodeDrains(home)  # type: ignore[arg-type]

    async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        return {name: node("MIXED+DRAIN" if name in self.drained else "MIXED", name) for name in names}

    async def drain_node(self, name: str, reason: str) -> None:
        if self.refuses:
            raise SlurmRefused("no")
        self.drained[name] = reason

    def judge(self, *hosts: str, verdict: HealthVerdict = HealthVerdict.RED) -> list[str]:
        async def play() -> list[str]:
            return await asyncio.gather(*(self.sick.judge_node(host, RedNode(7, 1, verdict)) for host in hosts))

        return asyncio.run(play())


def test_a_red_node_is_drained_once_in_fixed_words(tmp_path: Path) -> None:
    scene = Scene(tmp_path, sick_nodes_per_day=8)
    assert scene.judge("n2", "n2") == ["drained", "not drained: the node is down or drained already"]
    scene.judge("n3", verdict=HealthVerdict.HANGS)
    assert scene.drained == {
        "n2": "gemini-hpc: sick, the health check is red, after job 7 restart 1",
        "n3": "gemini-hpc: sick, the health check does not end, after job 7 restart 1",
    }
    assert [(event, host) for event, host, _ in scene.said] == [
        ("drained", "n2"),
        ("not_drained", "n2"),
        ("drained", "n3"),
    ]
    assert not scene.alerts
    kept = read_visits(str(tmp_path / "lemons.json"), 0.0)
    assert {name: [(v.what, v.job) for v in visits] for name, visits in kept.items()} == {
        "n2": [("unhealthy", 7)],
        "n3": [("unhealthy", 7)],
    }


def test_the_days_budget_is_the_journals(tmp_path: Path) -> None:
    scene = Scene(tmp_path, sick_nodes_per_day=2)
    scene.judge("n1", "n2", "n3")
    assert sorted(scene.drained) == ["n1", "n2"] and scene.alerts == [("sick nodes", "n3")]
    scene.journal.close()
    again = Scene(tmp_path, sick_nodes_per_day=2)
    assert again.judge("n4") == ["not drained: 2 nodes drained within a day, 2 allowed"]
    assert not again.drained and again.said[-1][0] == "not_drained"


def test_what_slurm_refuses_is_said(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.refuses = True
    scene.judge("n1")
    assert not scene.drained and scene.said == [("not_drained", "n1", "the health check is red: no")]
