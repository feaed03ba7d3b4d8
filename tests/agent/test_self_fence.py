"""Requirement cut-off-nodes, state by state: when the watch over being cut off ends the ranks of its node, and when
it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.self_fence import SelfFence
from gemini_hpc.config import Settings
from gemini_hpc.core.views import View
from gemini_hpc.wire.local import Attach

from .contexts import QuietListener, made_context

LIMIT_S = 0.1


class Rank:
    """A training process that ends at the first signal."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)
        self.closed.set()


class World:
    """An agent's surroundings: cut off from everything, unless a test says otherwise."""

    def __init__(self) -> None:
        self.rank, self.found, self.searched = Rank(), False, 0
        self.refuses = True
        self.limit_s, self.hosts, self.mode = LIMIT_S, ("n1", "n2", "n3"), "act"
        self.logged: list[str] = []
        # n3 is no partner of this node, which never hears whether that one is dead.
        self.mesh = SimpleNamespace(links={"n2": None}, dead={"n2"}, can_reach_anybody=self.can_reach_anybody)
        self.controller = SimpleNamespace(configured=True, connected=False, refused_at=0.0, may_act=False)
        self.detached, self.attached = False, True

    async def can_reach_anybody(self, limit_s: float) -> bool:
        self.searched += 1
        return self.found

    async def watch(self, seconds: float = 6 * LIMIT_S) -> bool:
        """Whether the rank has been ended after so long."""
        membership, mesh, unused = Membership(), cast(Any, self.mesh), cast(Any, None)
        membership.detached = self.detached
        if self.attached:
            attach = Attach(7, 0, ",".join(self.hosts), "n1", 2)
            membership.incarnation = Incarnation(attach, View(self.hosts), mesh, unused, unused)
        trainings: Any = [SimpleNamespace(present={0: self.rank})]
        fence = SelfFence(
            made_context(
                membership,
                log=lambda name, **_: self.logged.append(name),
                self_fence_s=self.limit_s,
                mode=self.mode,
            ),
            self.controller,
            trainings,
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.refuses:
                self.controller.refused_at = time.monotonic()
            fence.check_alone(time.monotonic())
            await asyncio.sleep(0.01)
        return bool(self.rank.signals)


def change(path: str, value: Any) -> Callable[[World], None]:
    def apply(world: World) -> None:
        *names, last = path.split(".")
        there: Any = world
        for name in names:
            there = getattr(there, name)
        setattr(there, last, value)

    return apply


STATES = {
    "the controller is there": change("controller.connected", True),
    "the controller has not been dialled since": change("refuses", False),
    "one peer is there": change("mesh.dead", {"n3"}),
    "a peer that is no partner is there": change("found", True),
    "a job of one node": change("hosts", ("n1",)),
    "the job has ended here": change("detached", True),
    "a site without a controller": change("controller.configured", False),
    "a site that does not want it": change("limit_s", 0.0),
    "before the first incarnation": change("attached", False),
    "not for so long yet": change("limit_s", 100.0),
    "a site that only observes": change("mode", "observe"),
    "a canary elsewhere": change("mode", "canary"),
}


def test_cut_off() -> None:
    assert asyncio.run(World().watch())


def test_modes() -> None:
    """A canary's own jobs are cut off as ever; elsewhere the log says once what would have happened."""
    canary, observing = World(), World()
    canary.mode, observing.mode = "canary", "observe"
    canary.controller.may_act = True
    assert asyncio.run(canary.watch())
    assert not asyncio.run(observing.watch())
    assert (canary.logged, observing.logged) == (["self_fenced"], ["withheld"])


@pytest.mark.parametrize("state", STATES)
def test_not_cut_off(state: str) -> None:
    async def run() -> bool:
        world = World()
        STATES[state](world)
        return await world.watch()

    assert not asyncio.run(run())


def test_found_peers_start_the_clock_anew() -> None:
    async def run() -> int:
        world = World()
        world.found = True
        assert not await world.watch(5.5 * LIMIT_S)
        return world.searched

    assert 2 <= asyncio.run(run()) <= 6


@pytest.mark.parametrize("alive", [None, "n2", "n40", "n200"])
def test_every_peer_is_looked_for(alive: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two hundred, of which links to a few were kept; those that are called dead are left out."""
    asked: set[str] = set()

    async def reach(self: Mesh, name: str, timeout_s: float) -> bool:
        asked.add(name)
        await asyncio.sleep(0.001)
        return name == alive

    async def run() -> bool:
        hosts = tuple(f"n{i}" for i in range(1, 201))
        mesh = Mesh(AgentIdentity(Settings(), 1, 0, "n1", ""), 0, hosts, QuietListener(), lambda text: None)
        mesh.dead.update({"n3", "n4"})
        try:
            return await mesh.can_reach_anybody(10.0)
        finally:
            mesh.close()

    monkeypatch.setattr(Mesh, "_can_reach", reach)
    assert asyncio.run(run()) is (alive is not None)
    assert asked.isdisjoint({"n1", "n3", "n4"}) and (alive is not None or len(asked) == 197)
