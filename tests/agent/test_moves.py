"""A node that the job is to leave: whoever sees the seal that is resumed from has been told that it is the last."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent import spares
from gemini_hpc.agent.daemon import _build_view
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.round_events import Heard, Log, Send
from gemini_hpc.wire import peer
from gemini_hpc.wire.local import Attach

HOSTS = ["n1", "n2", "n3", "n4"]
SEAL = "seal"


class Agent:
    """Of a job of three and one spare. seals: whether its rank is held as it sees each; views: begun."""

    def __init__(self, net: Net, rank: int) -> None:
        self.net, self.name = net, HOSTS[rank]
        self.held, self.seals, self.views = False, list[bool](), list[tuple[str, ...]]()
        rounds = SimpleNamespace(
            round=3,
            parent=HOSTS[(rank - 1) // 2] if rank else None,
            children=tuple(HOSTS[2 * rank + 1 : 2 * rank + 3]),
        )
        attach = Attach(7, 0, "n[1-4]", "n1", 2, spares=1)
        self.incarnation: Any = SimpleNamespace(
            attach=attach,
            view=_build_view(attach),
            rounds=rounds,
            live=True,
            restart=0,
        )
        self.incarnation.hosts = tuple(self.incarnation.view.hosts)
        here = self.here = Membership()
        here.incarnation, here.detached, here.epoch = self.incarnation, False, 5
        self.spares = spares.Spares(self.name, here, lambda dead: False)

    def step(self, event: spares.Event) -> None:
        for effect in self.spares.step(event, self.net.now):
            match effect:
                case Send(host, message):
                    self.net.links[self.name, host].append(message)
                case spares.Later(then, after_s):
                    self.net.later.append((self.net.now + after_s, self, then))
                case spares.Hold(epoch):
                    self.held = bool(epoch)
                case spares.EnterView(attach):
                    self.views.append(attach.lost)
                case Log():
                    pass
                case _:
                    raise AssertionError(effect)

    def move_off(self, host: str) -> None:
        assert not self.spares.explain_refusal([host])
        self.step(spares.Move(frozenset([host])))

    def told(self, host: str, message: Any) -> None:
        if message == SEAL:
            self.sealed()
        else:
            self.step(Heard(host, message))

    def sealed(self) -> None:
        """The root's decision, or what comes of it down here."""
        for child in self.incarnation.rounds.children:
            self.net.links[self.name, child].append(SEAL)
        self.seals.append(self.held)
        self.step(spares.Sealed())


class Net:
    """Links that keep what is sent in order; `late` lists those that carry nothing yet."""

    def __init__(self) -> None:
        self.links = {(a, b): deque[Any]() for a in HOSTS for b in HOSTS if a != b}
        self.late: set[tuple[str, str]] = set()
        self.now = 0.0
        self.later: list[tuple[float, Agent, spares.Event]] = []
        self.agents = {host: Agent(self, rank) for rank, host in enumerate(HOSTS)}

    def carry(self, for_s: float = 0.0) -> None:
        """Deliver the messages on their way, and let so much time go by."""
        while ready := [way for way, sent in self.links.items() if sent and way not in self.late]:
            for a, b in ready:
                self.agents[b].told(a, self.links[a, b].popleft())
        self.now += for_s
        for due in sorted((due for due in self.later if due[0] <= self.now), key=lambda due: due[0]):
            self.later.remove(due)
            due[1].step(due[2])

    def left_by(self) -> list[str]:
        return [agent.name for agent in self.agents.values() if agent.views]


@pytest.mark.parametrize("asked", HOSTS)
def test_no_rank_goes_beyond_the_seal_at_which_a_node_is_left(asked: str) -> None:
    net, host = Net(), "n3" if asked != "n3" else "n2"
    net.agents[asked].move_off(host)
    net.carry()
    assert all(agent.held for agent in net.agents.values()) and not net.left_by()
    net.agents["n1"].sealed()
    net.carry()
    assert net.left_by() == [asked] and net.agents[asked].views == [(host,)]
    assert all(agent.seals == [True] for agent in net.agents.values())
    assert net.agents[asked].held, "some of its ranks may still run"


def test_a_seal_that_the_root_decided_before_it_was_told_is_not_the_one() -> None:
    net = Net()
    net.late = {("n2", "n1"), ("n2", "n4")}
    net.agents["n2"].move_off("n3")
    net.agents["n1"].sealed()
    net.carry()
    assert net.agents["n2"].seals == [False] and not net.left_by()
    net.late = {("n2", "n4")}
    net.carry()
    net.agents["n1"].sealed()
    net.carry()
    assert net.left_by() == ["n2"] and not net.agents["n4"].seals, "n4 has not heard of anything"
    net.late = set()
    net.carry()
    assert net.agents["n4"].seals == [False, True]


def test_ranks_are_let_go_where_no_seal_comes() -> None:
    net = Net()
    net.agents["n4"].move_off("n3")
    net.carry(4.9)
    assert all(agent.held for agent in net.agents.values()) and not net.left_by()
    net.carry(0.2)
    assert all(agent.held for agent in net.agents.values()) and net.left_by() == ["n4"]
    net.carry(1.0)
    assert not any(agent.held for agent in net.agents.values())


def test_only_the_tree_of_this_round_is_heeded() -> None:
    net = Net()
    n2, n1 = net.agents["n2"], net.agents["n1"]
    n2.told("n3", peer.HoldDown(3))
    n2.told("n1", peer.HoldDown(2))
    n1.told("n4", peer.MoveUp(3))
    n1.told("n2", peer.MoveUp(2))
    n2.incarnation.live = False
    n2.told("n1", peer.HoldDown(3))
    net.carry()
    assert not any(agent.held for agent in net.agents.values())


def test_a_requeue_meanwhile_has_chosen_the_nodes_anew() -> None:
    net = Net()
    n4 = net.agents["n4"]
    n4.move_off("n3")
    net.carry()
    later = SimpleNamespace(**{**vars(n4.incarnation), "restart": 1})
    n4.here.incarnation = later  # type: ignore[assignment]
    n4.step(spares.Sealed())
    net.carry(6.0)
    assert not net.left_by()
