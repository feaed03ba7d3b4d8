"""Nodes that are silent, and alone hold something that is sealed: a job with spares waits for them a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent import spares
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.round_events import Log
from gemini_hpc.agent.rescue import Rescue
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.views import View
from gemini_hpc.wire.local import Attach

from .contexts import made_context

HOSTS = ("n1", "n2", "n3", "n4", "n5")


class Agent:
    """On n1, of a job of four nodes and a spare, with two copies: n1 and n2 hold each other's, n3 and n4 too."""

    def __init__(self, sealed: bool = True, live: bool = False) -> None:
        self.lost: tuple[str, ...] = ()
        self.events: list[str] = []
        self.dead: set[str] = set()
        attach = Attach(7, 0, "n[1-5]", "n1", 2, spares=1)
        here = self.here = Membership()
        self.silent: set[str] = set()
        mesh = SimpleNamespace(dead=self.dead, list_silent=lambda: self.silent)
        view, rounds = View(HOSTS, 1), SimpleNamespace(round=3, parent=None, children=())
        incarnation: Any = SimpleNamespace(
            attach=attach, view=view, mesh=mesh, rounds=rounds, hosts=HOSTS, live=True, restart=0
        )
        here.incarnation, here.detached = incarnation, False
        here.noderanks = {host: rank for rank, host in enumerate(HOSTS[:4])}
        trainings: Any = [SimpleNamespace(name="default", sealed=Stamp(1, 9) if sealed else None)]
        unused: Any = None
        replicas: Any = SimpleNamespace(trainings=trainings, store=None, outlines=None, filling=None)
        rescue = Rescue(made_context(here), replicas, unused, unused)
        rescue.list_live_ranks = lambda name: (2,) if live else ()  # type: ignore[method-assign]
        self.spares = spares.Spares("n1", here, rescue.are_sole_holders)
        self.now = 0.0
        self.later: list[tuple[float, spares.Event]] = []

    def told(self, event: spares.Event) -> None:
        for effect in self.spares.step(event, self.now):
            match effect:
                case spares.Later(then, after_s):
                    self.later.append((self.now + after_s, then))
                case spares.EnterView(attach):
                    self.lost = attach.lost
                case Log(name):
                    self.events.append(name)
                case _:
                    raise AssertionError(effect)

    def wait(self, for_s: float = 60.0) -> None:
        """So much time goes by."""
        until = self.now + for_s
        while self.later and min(self.later, key=lambda due: due[0])[0] <= until:
            due = min(self.later, key=lambda due: due[0])
            self.later.remove(due)
            self.now = due[0]
            self.told(due[1])
        self.now = until


def told(dead: set[str], back: set[str] = frozenset(), **of: bool) -> tuple[tuple[str, ...], list[str]]:  # type: ignore[assignment]
    """What n1 goes on without, and its events, where these nodes fall silent, and some are heard again soon."""
    agent = Agent(**of)
    agent.dead |= dead
    agent.told(spares.Died())
    agent.wait(2.0)
    assert not back or not agent.lost, "it has not waited"
    agent.dead -= back
    agent.wait()
    return agent.lost, agent.events


def test_nobody_waits_for_a_node_whose_copies_others_hold() -> None:
    assert told({"n3"}) == (("n3",), ["without"])


def test_a_node_that_comes_back_is_not_left() -> None:
    assert told({"n3", "n4"}, {"n3", "n4"}) == ((), ["waits"])


def test_one_that_comes_back_is_enough() -> None:
    assert told({"n3", "n4"}, {"n4"}) == (("n3",), ["waits", "without"])


def test_nodes_that_come_back_one_by_one_all_come_back() -> None:
    """Also where those that are missing last hold nothing, and another death is told meanwhile."""
    agent = Agent()
    agent.dead |= {"n2", "n3", "n4", "n5"}
    agent.told(spares.Died())
    agent.wait(1.0)
    for back in ("n2", "n3", "n4", "n5"):
        agent.dead -= {back}
        agent.told(spares.Died())
        agent.wait(1.0)
    agent.wait()
    assert (agent.lost, agent.events) == ((), ["waits"])


@pytest.mark.parametrize("cut_off", [True, False])
def test_who_loses_sight_of_most_others_does_not_go_on(cut_off: bool) -> None:
    """n3 is dead for it first; the others, which it may not reach either, are suspected only."""
    agent = Agent()
    agent.dead |= {"n3"}
    agent.silent |= {"n4", "n5"}
    agent.told(spares.Died())
    agent.wait(2.0)
    assert not agent.lost
    agent.silent.clear()
    agent.dead |= {"n4", "n5"} if cut_off else set()
    agent.wait()
    assert agent.lost == (() if cut_off else ("n3",))


def test_suspects_that_stay_suspects_are_not_waited_for_any_longer() -> None:
    agent = Agent()
    agent.dead |= {"n3"}
    agent.silent |= {"n4", "n5"}
    agent.told(spares.Died())
    agent.wait(3.9)
    assert not agent.lost
    agent.wait(0.2)
    assert agent.lost == ("n3",)


def test_the_wait_ends() -> None:
    """Then the tier serves, or the job begins anew: with two spares, for one does not make up for two nodes."""
    agent = Agent()
    incarnation: Any = agent.here.incarnation
    incarnation.view = View((*HOSTS, "n6"), 2)
    agent.dead |= {"n3", "n4"}
    agent.told(spares.Died())
    agent.wait()
    assert (agent.lost, agent.events) == (("n3", "n4"), ["waits", "without"])


@pytest.mark.parametrize("of", [{"sealed": False}, {"live": True}])
def test_what_is_not_there_or_elsewhere_as_well_is_not_waited_for(of: dict[str, bool]) -> None:
    assert "waits" not in told({"n3", "n4"}, **of)[1]
