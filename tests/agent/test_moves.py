"""A node that the job is to leave: whoever sees the seal that is resumed from has been told that it is the last."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent.daemon import _build_view
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.spares import Spares
from gemini_hpc.wire import peer
from gemini_hpc.wire.local import Attach

from .contexts import made_context

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
            leads=not rank,
            send=self.send,
            restart=0,
        )
        self.incarnation.hosts = tuple(self.incarnation.view.hosts)
        self.incarnation.send_down = lambda m: [self.send(child, m) for child in rounds.children]
        here = self.here = Membership()
        here.incarnation, here.detached, here.epoch = self.incarnation, False, 5
        launches: Any = SimpleNamespace(record_loss=lambda gone, why: None)
        self.spares = Spares(
            made_context(here, self.name, spawn=net.spawn),
            launches,
            lambda attach, view: self.views.append(attach.lost),
            lambda: None,
            wait_until_ready=lambda: asyncio.sleep(0),
            would_lose_state=lambda dead: False,
            hold_ranks=lambda epoch: setattr(self, "held", bool(epoch)),
        )

    def send(self, host: str, message: Any) -> bool:
        self.net.links[self.name, host].append(message)
        return True

    def told(self, host: str, message: Any) -> None:
        if message == SEAL:
            self.sealed()
        else:
            self.spares.on_message(self.incarnation, host, message)

    def sealed(self) -> None:
        """The root's decision, or what comes of it down here."""
        self.incarnation.send_down(SEAL)
        self.seals.append(self.held)
        self.spares.leave_after_seal()


class Net:
    """Links that keep what is sent in order; `late` lists those that carry nothing yet."""

    def __init__(self) -> None:
        self.links = {(a, b): deque[Any]() for a in HOSTS for b in HOSTS if a != b}
        self.late: set[tuple[str, str]] = set()
        self.spawned: list[asyncio.Task[None]] = []
        self.agents = {host: Agent(self, rank) for rank, host in enumerate(HOSTS)}

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.spawned.append(asyncio.get_running_loop().create_task(coroutine))
        return self.spawned[-1]

    async def carry(self) -> None:
        while ready := [way for way, sent in self.links.items() if sent and way not in self.late]:
            for a, b in ready:
                self.agents[b].told(a, self.links[a, b].popleft())
        await asyncio.sleep(0.001)

    def left_by(self) -> list[str]:
        return [agent.name for agent in self.agents.values() if agent.views]


Story = Callable[[Net], Coroutine[Any, Any, None]]


@pytest.fixture
def tell() -> Iterator[Callable[[Story], None]]:
    def whole(story: Story) -> None:
        async def run() -> None:
            net = Net()
            await story(net)
            for task in net.spawned:
                task.cancel()

        asyncio.run(run())

    yield whole


@pytest.mark.parametrize("asked", HOSTS)
def test_no_rank_goes_beyond_the_seal_at_which_a_node_is_left(tell: Callable[[Story], None], asked: str) -> None:
    async def story(net: Net) -> None:
        host = "n3" if asked != "n3" else "n2"
        assert net.agents[asked].spares.move([host]) == ""
        await net.carry()
        assert all(agent.held for agent in net.agents.values()) and not net.left_by()
        net.agents["n1"].sealed()
        await net.carry()
        assert net.left_by() == [asked] and net.agents[asked].views == [(host,)]
        assert all(agent.seals == [True] for agent in net.agents.values())
        assert net.agents[asked].held, "some of its ranks may still run"

    tell(story)


def test_a_seal_that_the_root_decided_before_it_was_told_is_not_the_one(tell: Callable[[Story], None]) -> None:
    async def story(net: Net) -> None:
        net.late = {("n2", "n1"), ("n2", "n4")}
        net.agents["n2"].spares.move(["n3"])
        net.agents["n1"].sealed()
        await net.carry()
        assert net.agents["n2"].seals == [False] and not net.left_by()
        net.late = {("n2", "n4")}
        await net.carry()
        net.agents["n1"].sealed()
        await net.carry()
        assert net.left_by() == ["n2"] and not net.agents["n4"].seals, "n4 has not heard of anything"
        net.late = set()
        await net.carry()
        assert net.agents["n4"].seals == [False, True]

    tell(story)


def test_ranks_are_let_go_where_no_seal_comes(tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(net: Net) -> None:
        net.agents["n4"].spares.move(["n3"])
        await net.carry()
        assert all(agent.held for agent in net.agents.values())
        await asyncio.sleep(0.3)
        assert not any(agent.held for agent in net.agents.values()) and net.left_by() == ["n4"]

    monkeypatch.setattr("gemini_hpc.agent.spares._SEAL_S", 0.1)
    monkeypatch.setattr("gemini_hpc.agent.spares._HOLD_S", 0.15)
    tell(story)


def test_only_the_tree_of_this_round_is_heeded(tell: Callable[[Story], None]) -> None:
    async def story(net: Net) -> None:
        n2, n1 = net.agents["n2"], net.agents["n1"]
        n2.told("n3", peer.HoldDown(3))
        n2.told("n1", peer.HoldDown(2))
        n1.told("n4", peer.MoveUp(3))
        n1.told("n2", peer.MoveUp(2))
        n2.incarnation.live = False
        n2.told("n1", peer.HoldDown(3))
        await net.carry()
        assert not any(agent.held for agent in net.agents.values())

    tell(story)


def test_a_requeue_meanwhile_has_chosen_the_nodes_anew(
    tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(net: Net) -> None:
        n4 = net.agents["n4"]
        n4.spares.move(["n3"])
        await net.carry()
        later = SimpleNamespace(**{**vars(n4.incarnation), "restart": 1})
        n4.here.incarnation = later  # type: ignore[assignment]
        n4.spares.leave_after_seal()
        await asyncio.sleep(0.3)
        assert not net.left_by()

    monkeypatch.setattr("gemini_hpc.agent.spares._SEAL_S", 0.1)
    tell(story)
