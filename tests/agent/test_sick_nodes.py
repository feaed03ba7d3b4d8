"""Who failed first, told along a line of agents without links: messages are carried by hand, moments pass at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent import sick_nodes
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.sick_nodes import SickNodes
from gemini_hpc.core.culprits import Cause
from gemini_hpc.core.standstill import HangStanding, Place
from gemini_hpc.wire import peer

from .contexts import made_context

NAMES = ("n1", "n2", "n3")


class Net:
    """n1 - n2 - n3, the first is the root."""

    def __init__(self) -> None:
        self.sent: deque[tuple[str, str, Any]] = deque()
        self.events: list[tuple[str, str, str]] = []
        self.found: list[tuple[str, str, str]] = []
        self.judging: list[Coroutine[Any, Any, None]] = []
        self.memberships = {name: Membership() for name in NAMES}
        self.agents = {name: self._agent(at, name) for at, name in enumerate(NAMES)}
        self.begin(0)

    def _agent(self, at: int, name: str) -> SickNodes:
        def log(event: str, *, version: int = 0, detail: str = "", t: float | None = None) -> None:
            self.events.append((name, event, detail))

        def spawn(work: Coroutine[Any, Any, None]) -> Any:
            self.judging.append(work)

        context = made_context(self.memberships[name], name, log=log, spawn=spawn)
        return SickNodes(context, lambda host, why: self.found.append((name, host, why)))

    def begin(self, restart: int) -> None:
        """An incarnation."""
        self.incarnations: dict[str, Any] = {}
        for at, name in enumerate(NAMES):
            children = NAMES[at + 1 : at + 2]
            rounds = SimpleNamespace(
                parent=NAMES[at - 1] if at else None, children=children, round=3 + restart, launch="7.0"
            )
            self.incarnations[name] = self.memberships[name].incarnation = SimpleNamespace(  # type: ignore[assignment]
                restart=restart,
                hosts=NAMES,
                rounds=rounds,
                leads=not at,
                send=lambda host, m, name=name: self.sent.append((name, host, m)),
                send_down=lambda m, name=name, children=children: self.sent.extend(
                    (name, child, m) for child in children
                ),
            )

    def carry(self) -> None:
        while self.sent:
            source, target, message = self.sent.popleft()
            self.agents[target].on_message(self.incarnations[target], source, message)

    def settle(self) -> None:
        """A moment passes."""
        self.carry()
        work, self.judging = self.judging, []
        for judge in work:
            asyncio.run(judge)
        self.carry()

    def end(self, attempt: int, *, at: int | None = None, **causes: Cause) -> None:
        """Ranks of these nodes end in an attempt, each later than the one before, and all is judged."""
        version = 10 * (attempt + 1) if at is None else at
        for name, cause in causes.items():
            self.agents[name].report_end("7.0", attempt, NAMES.index(name), cause, version)
        self.settle()


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    monkeypatch.setattr(sick_nodes, "_SETTLE_S", 0.0)
    return Net()


def test_a_node_whose_rank_failed_first_twice_is_sick(net: Net) -> None:
    net.end(0, n2=Cause.CONSEQUENCE, n3=Cause.CRASHED)
    assert net.events == [
        (
            "n1",
            "failed_first",
            "rank 2 on n3 was killed or crashed: attempt 0 of step 7.0, 1 so far that count against this node",
        )
    ]
    assert [net.agents[name].suspects_this_node for name in NAMES] == [False, False, True]
    net.end(1, n1=Cause.CONSEQUENCE, n3=Cause.DEVICE)
    assert net.found == [("n1", "n3", "rank 2 on n3 had an error of its device; 2 times its ranks failed first")]
    assert all(agent.list_sick_nodes() == ["n3"] for agent in net.agents.values())


def test_a_users_bug_is_told_and_speaks_against_no_node(net: Net) -> None:
    for attempt in range(4):
        net.end(attempt, n3=Cause.RAISED)
    net.end(9, n3=Cause.CRASHED, at=0)
    details = [detail.partition(", ")[2] for *_, detail in net.events]
    assert details[0] == "a failure of the program: it does not count against the node"
    assert details[-1] == "a failure of the program, before its first step: it does not count against the node"
    assert not net.found and not net.agents["n3"].suspects_this_node


def test_nobody_is_blamed_for_the_program_the_network_or_another_nodes_turn(net: Net) -> None:
    for attempt in range(4):
        net.end(attempt, n2=Cause.RAISED, n3=Cause.RAISED)
        net.end(10 + attempt, n1=Cause.CONSEQUENCE, n2=Cause.CONSEQUENCE)
    assert not net.events
    net.end(20, n2=Cause.CRASHED)
    net.end(21, n3=Cause.CRASHED)
    assert [detail.rpartition(", ")[2] for *_, detail in net.events] == ["1 so far that count against this node"] * 2
    assert not net.found


def test_one_attempt_counts_once_however_often_it_is_told(net: Net) -> None:
    for _ in range(3):
        net.end(0, n3=Cause.CRASHED)
        net.end(0, n2=Cause.CRASHED)
    assert len(net.events) == 1 and not net.found


def test_another_incarnation_counts_and_so_does_another_root(net: Net) -> None:
    net.end(0, n3=Cause.CRASHED)
    net.begin(1)
    net.agents["n1"] = net._agent(0, "n1")  # a new agent knows nothing; those below do
    net.end(0, n3=Cause.CRASHED, at=20)
    assert net.agents["n2"]._tally.count_failures("n3") == 2 and not net.found
    net.begin(2)
    net.end(0, n3=Cause.CRASHED, at=30)
    assert len(net.found) == 1


def test_hangs_count(net: Net) -> None:
    def place(version: int, launched: int, rank: int, *, runs: bool = True) -> Place:
        return Place(version, launched, 5, rank, NAMES[rank], "allreduce_", runs)

    def hung(least: Place, most: Place) -> None:
        standing = HangStanding(3, 3, 60.0, 0.0, 600.0, 1.0, least, most, True)
        net.agents["n1"].record_hang(net.incarnations["n1"], standing)
        net.agents["n1"].record_hang(net.incarnations["n1"], standing)  # it is said each second
        net.settle()

    hung(place(4, 3, 1), place(4, 3, 2))
    assert not net.events, "all are in the same collective: nobody is behind"
    hung(place(4, 2, 1), place(4, 3, 2))
    assert len(net.events) == 1 and "rank 1 on n2 kept the others waiting" in net.events[0][2]
    net.end(0, n2=Cause.CRASHED)
    assert [host for _, host, _ in net.found] == ["n2"]


def test_a_red_node_is_sick_at_once(net: Net) -> None:
    net.agents["n3"].report_unhealthy(2, "Xid 79")
    net.carry()
    assert net.found == [("n1", "n3", "health check on n3: Xid 79")] and net.events == [("n3", "unhealthy", "Xid 79")]
    assert [net.agents[name].suspects_this_node for name in NAMES] == [False, False, True]


def test_strangers_are_not_heard(net: Net) -> None:
    first = peer.FailedFirst("7.0", 0, "n2", 1, Cause.CRASHED)
    ended = peer.RankEnded("7.0", 0, "n2", 1, Cause.CRASHED)
    net.agents["n1"].on_message(net.incarnations["n1"], "n2", first)  # not from below
    net.agents["n2"].on_message(net.incarnations["n2"], "n1", ended)  # not from above
    net.agents["n1"].on_message(net.incarnations["n1"], "n3", ended)  # no child
    net.agents["n1"].on_message(net.incarnations["n1"], "n2", peer.RankEnded("7.0", 0, "n9", 1, Cause.CRASHED))
    net.agents["n1"].on_message(net.incarnations["n1"], "n3", peer.Unhealthy("n3", 2, "Xid 79"))
    net.settle()
    assert not net.found
    assert not net.events and net.agents["n1"]._tally.count_failures("n2") == 0


def test_no_more_attempts_are_judged_at_a_time_than_there_is_room_for(net: Net) -> None:
    for attempt in range(1000):
        net.agents["n1"].report_end("7.0", attempt, 0, Cause.CRASHED, 10)
    assert len(net.judging) == len(net.agents["n1"]._open) == sick_nodes._MOST_OPEN
    net.settle()
    assert not net.agents["n1"]._open and len(net.agents["n1"]._judged) <= sick_nodes._MOST_OPEN
