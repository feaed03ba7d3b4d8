"""Agents hear of nodes that are drained under their job: once, and of nothing else. Against a scripted Slurm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemini_hpc.controller.planned_drains import LOOK_S, DrainWatch
from gemini_hpc.controller.registry import ConnectedAgent, StoredJob, Track
from gemini_hpc.slurm import SlurmError, SlurmRefused
from gemini_hpc.slurm.facts import Job, Node
from gemini_hpc.slurm.text import parse_node
from gemini_hpc.wire.controller import Draining

from .fake_slurm import FakeSlurm


class Scene(FakeSlurm):
    """A job of n1 and n2 in its second life, with an agent on each, and one of its first life on n3."""

    def __init__(self, path: Path) -> None:
        self.states = {"n1": "ALLOCATED", "n2": "MIXED", "n3": "IDLE+DRAIN"}
        self.asked: list[list[str]] = []
        self.now, self.dumb = 0.0, False
        self.sent: list[tuple[str, Draining]] = []
        stored = StoredJob(raw_id=7, user_id=5001, allocations={0: ["n1", "n3"], 1: ["n1", "n2"]})
        self.track = Track(stored, str(path))
        self.track.job = cast(Job, SimpleNamespace(restarts=1, partition="long"))
        self.partitions_are = {"main": "DRAIN", "long": "UP"}
        for host, restart in (("n1", 1), ("n2", 1), ("n3", 0)):
            link = SimpleNamespace(closed=False, send=lambda message, host=host: self.sent.append((host, message)))
            self.track.agents[host] = ConnectedAgent(cast(Any, link), host, 7, "x", restart=restart)
        self.watch = DrainWatch(self, clock=lambda: self.now)

    async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        if self.dumb:
            raise SlurmRefused("no answer")
        self.asked.append(list(names))
        lines = {name: f"NodeName={name} NodeAddr={name} CPUTot=4 State={self.states[name]}" for name in names}
        return {name: parse_node(line) for name, line in lines.items()}

    async def read_partitions(self) -> dict[str, str]:
        return self.partitions_are

    def look(self, *, after: float = LOOK_S) -> list[tuple[str, tuple[str, ...]]]:
        self.now += after
        self.sent.clear()
        asyncio.run(self.watch.report_drains([self.track]))
        return [(host, message.hosts) for host, message in self.sent]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "7.json")


def test_nothing_is_drained(scene: Scene) -> None:
    assert scene.look() == [] and scene.asked == [["n1", "n2"]]


def test_the_agents_of_this_life_hear_of_it_once(scene: Scene) -> None:
    scene.states["n2"] = "MIXED+DRAIN"
    assert scene.look() == [("n1", ("n2",)), ("n2", ("n2",))]
    assert scene.look() == []
    scene.states["n1"] = "ALLOCATED+DRAIN"
    assert scene.look() == [("n1", ("n1",)), ("n2", ("n1",))]


def test_one_that_is_given_back_and_drained_again_counts_anew(scene: Scene) -> None:
    scene.states["n2"] = "MIXED+DRAIN"
    assert scene.look()
    scene.states["n2"] = "MIXED"
    assert not scene.look()
    scene.states["n2"] = "MIXED+DRAIN"
    assert scene.look()


@pytest.mark.parametrize("state", ["DRAIN", "DOWN", "INACTIVE"])
def test_its_partition_is_drained(scene: Scene, state: str) -> None:
    assert not scene.look()
    scene.partitions_are["long"] = state
    assert scene.look() == [("n1", ()), ("n2", ())]
    assert [message.partition for _, message in scene.sent] == 2 * [f"partition long is {state}"]
    assert not scene.look()
    scene.partitions_are["long"] = "UP"
    assert not scene.look()


def test_a_node_that_is_down_is_not_drained(scene: Scene) -> None:
    scene.states["n2"] = "DOWN+DRAIN"
    assert not scene.look()


def test_slurm_is_not_asked_all_the_time(scene: Scene) -> None:
    assert not scene.look()
    assert not scene.look(after=LOOK_S / 2)
    assert len(scene.asked) == 1


def test_no_answer_means_no_knowledge(scene: Scene) -> None:
    scene.states["n2"], scene.dumb = "MIXED+DRAIN", True
    with pytest.raises(SlurmError):
        scene.look()
    scene.dumb = False
    assert scene.look()


def test_where_no_agent_is_connected_it_is_told_later(scene: Scene) -> None:
    scene.states["n2"] = "MIXED+DRAIN"
    for agent in scene.track.agents.values():
        agent.link.closed = True  # type: ignore[misc]
    assert not scene.look()
    for agent in scene.track.agents.values():
        agent.link.closed = False  # type: ignore[misc]
    assert scene.look()
