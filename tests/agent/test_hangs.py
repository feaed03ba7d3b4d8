"""Standstills told along a tree of agents without links: messages are carried by hand, ranks are pages in memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent.hangs import Hangs
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.wire import control_page, peer, progress_page
from gemini_hpc.wire.progress_page import Progress

from .contexts import made_context

HANG_S = 40.0
Spawned = Coroutine[Any, Any, None]


class Sets:
    """The one training of an agent."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def __iter__(self) -> Iterator[Training]:
        return iter([self._training])

    def get(self, name: str) -> Training | None:
        return self._training if self.may_have(name) else None

    def may_have(self, name: str) -> bool:
        return name == "default"


class Node:
    """One agent, and its rank."""

    def __init__(self, net: Net, rank: int, names: list[str]) -> None:
        self.net, self.name = net, names[rank]
        self.page = os.memfd_create("page")
        self.seen, self.runs = Progress(), True
        self.training = Training("default")
        rounds = SimpleNamespace(
            round=3,
            launch="7.0",
            parent=names[rank - 1] if rank else None,
            children=tuple(names[rank + 1 : rank + 2]),
        )
        self.incarnation: Any = SimpleNamespace(
            restart=0, rounds=rounds, live=True, leads=not rank, attach=SimpleNamespace(hang=None)
        )
        self.incarnation.send = self.send
        self.incarnation.send_down = lambda message: [self.send(child, message) for child in rounds.children]
        self.membership = Membership()
        self.membership.incarnation, self.membership.detached = self.incarnation, False
        trainings: Any = Sets(self.training)
        self.begun: list[str] = []
        launches: Any = SimpleNamespace(record_hang=lambda launch, rank, what: not self.begun.append(what))
        self.hangs = Hangs(
            made_context(
                self.membership,
                self.name,
                directory=str(net.directory),
                log=self.log,
                spawn=self.spawn,
                hang_s=HANG_S,
            ),
            trainings,
            launches,
            lambda _, standing: net.blamed.append((self.name, standing.least.rank)),
            now=lambda: net.now,
        )
        self.training.apply_plan(None, 3)
        self.training.world, self.training.greeted = len(names), {rank}
        self.training.page.set_state(control_page.STATE_PROTECTED)
        self.rank = rank
        self.write()
        self.training.ranks.add(rank, self.page, net.now)

    def log(self, name: str, *, version: int = 0, detail: str = "", t: float | None = None) -> None:
        self.net.events.append((self.name, name, version, detail))

    def spawn(self, work: Spawned) -> Any:
        self.net.work.append(work)

    def send(self, host: str, message: Any) -> bool:
        self.net.sent.append((self.name, host, message))
        return True

    def write(self) -> None:
        if self.runs:
            self.seen = self.seen._replace(beats=self.seen.beats + 1)
        os.pwrite(self.page, progress_page.pack(self.seen), 0)


class Net:
    """Three in a line, n1 the root."""

    def __init__(self, directory: Path) -> None:
        self.now, self.directory = 1000.0, directory
        self.events: list[tuple[str, str, int, str]] = []
        self.sent: deque[tuple[str, str, Any]] = deque()
        self.work: list[Spawned] = []
        self.blamed: list[tuple[str, int]] = []
        names = ["n1", "n2", "n3"]
        self.nodes = [Node(self, rank, names) for rank in range(3)]

    def second(self) -> int:
        """All look, and hear what the others say; how many messages that were."""
        self.now += 1.0
        for node in self.nodes:
            node.write()
        for node in reversed(self.nodes):
            node.hangs.check_progress(self.now)
        count = 0
        while self.sent:
            source, target, message = self.sent.popleft()
            node = next(node for node in self.nodes if node.name == target)
            node.hangs.on_message(node.incarnation, source, message)
            count += 1
        for work in self.work:
            with pytest.raises(StopIteration):
                work.send(None)
        self.work.clear()
        return count

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for node in self.nodes:
                node.seen = node.seen._replace(version=node.seen.version + 1, usual=5, collective="allreduce_")
            assert self.second() == 0, "nothing is said of a training that comes on"

    def hold(self, *, launched: int = 3, behind: int = 1) -> None:
        """One rank launches fewer than the others, and nobody goes on."""
        for node in self.nodes:
            node.seen = node.seen._replace(launched=launched - (node.rank == behind))

    def close(self) -> None:
        for node in self.nodes:
            os.close(node.page)
            node.training.close()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path)
    yield made
    made.close()


def seconds(net: Net, most: int, until: Callable[[], object]) -> int:
    for passed in range(most):
        if until():
            return passed
        net.second()
    return most


def test_the_agent_of_the_rank_that_is_behind_ends_it(net: Net) -> None:
    net.train(3)
    net.hold()
    assert HANG_S < seconds(net, 100, lambda: net.events) < HANG_S + 5
    [(host, name, version, detail)] = net.events
    assert (host, name, version) == ("n2", "hung", 3)
    assert "it has launched 2 collectives of step 4, others 3" in detail and detail.endswith(
        "its stack could not be read"
    )
    assert [len(node.begun) for node in net.nodes] == [0, 1, 0]
    assert all(node.training.hung.startswith("n2: rank 1: ") for node in net.nodes)
    assert set(net.blamed) == {("n1", 1)}, "by the root"
    seconds(net, 30, lambda: False)
    assert len(net.events) == 1 and len(net.nodes[1].begun) == 1, "once"


def test_what_goes_on_by_itself_is_forgotten(net: Net) -> None:
    net.train(3)
    net.hold()
    for node in net.nodes:
        node.incarnation.attach.hang = 20
    seconds(net, 100, lambda: net.events)
    net.nodes[2].seen = net.nodes[2].seen._replace(launched=4)
    net.second()
    net.second()
    assert [bool(node.training.hung) for node in net.nodes] == [True, True, False], "where ranks come on"
    net.train(0)


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_wherever_the_rank_is(net: Net, behind: int) -> None:
    net.train(3)
    net.hold(behind=behind)
    seconds(net, 60, lambda: net.events)
    assert [event[0] for event in net.events] == [f"n{behind + 1}"]


def test_off(net: Net) -> None:
    for node in net.nodes:
        node.incarnation.attach.hang = 0
    net.train(3)
    net.hold()
    assert seconds(net, 200, lambda: net.events) == 200


@pytest.mark.parametrize("steps", [0, 1])
def test_before_the_second_step_there_is_more_time(net: Net, steps: int) -> None:
    """A rank may compile, or prepare its data, while the others wait for it."""
    net.train(steps)
    net.hold()
    assert 4 * HANG_S < seconds(net, 250, lambda: net.events) < 4 * HANG_S + 5
    [(host, _, _, detail)] = net.events
    assert host == "n2" and ", before the second step; it has launched 2 collectives" in detail
    assert set(net.blamed) == {("n1", 1)}


def test_what_compiles_for_long_is_no_measure_for_later(net: Net) -> None:
    net.hold()
    assert seconds(net, 150, lambda: net.events) == 150
    for node in net.nodes:
        node.seen = node.seen._replace(version=1)
    net.second()  # it is said once more that they stand, and that they come on
    net.train(3)
    net.hold()
    assert HANG_S < seconds(net, 100, lambda: net.events) < HANG_S + 5


def test_the_whole_stack_is_kept_in_a_few_files(net: Net) -> None:
    long = "".join(f'  File "/x/data{at}.py", line {at} in read_{at}\n' for at in range(300))
    node = net.nodes[1]

    async def stack(training: Training, rank: int, client: Any) -> str:
        return long

    node.hangs._request_stack = stack  # type: ignore[method-assign]
    node.training.present[1] = SimpleNamespace(signal=lambda number: None)  # type: ignore[assignment]
    for launch in range(6):
        net.train(3)
        net.hold()
        before = len(net.events)
        assert seconds(net, 400, lambda: len(net.events) > before) < 400  # noqa: B023
        seconds(net, 2, lambda: False)
        path = net.directory / f"hung-{launch % 4}"
        assert path.read_text() == long and node.training.hung.endswith(f"; its stack: {path}")
        assert "; read_0 (data0.py:0)" in net.events[-1][3] and net.events[-1][3].endswith(f"; {path}")
        for each in net.nodes:
            each.incarnation.rounds.round += 1
            each.training.ranks.reset()
            each.training.ranks.add(each.rank, each.page, net.now)
    assert sorted(path.name for path in net.directory.iterdir()) == [f"hung-{at}" for at in range(4)]


def test_a_stack_that_cannot_be_kept_is_told_all_the_same(net: Net) -> None:
    hangs = net.nodes[1].hangs
    hangs._directory = str(net.directory / "none")
    assert hangs._write_stack("default", "text") == "" and net.events[-1][1] == "error"


@pytest.mark.parametrize("state", [control_page.STATE_ARMING, control_page.STATE_FROZEN])
def test_nothing_to_come_back_to(net: Net, state: int) -> None:
    net.train(3)
    net.hold()
    net.nodes[1].training.page.set_state(state)
    assert seconds(net, 100, lambda: net.events) == 100


def test_ranks_that_pause_together(net: Net) -> None:
    net.train(3)
    assert seconds(net, 500, lambda: net.events) == 500


def test_a_suspended_job(net: Net) -> None:
    """No rank runs; afterwards all have their time again."""
    net.train(3)
    net.hold()
    for node in net.nodes:
        node.runs = False
    assert seconds(net, 300, lambda: net.events) == 300
    for node in net.nodes:
        node.runs = True
    assert seconds(net, 30, lambda: net.events) == 30
    for node in net.nodes:
        node.seen = node.seen._replace(launched=4)
    assert seconds(net, 300, lambda: net.events) == 300, "all are there: it went on"


def test_one_rank_is_stopped_within_a_collective(net: Net) -> None:
    net.train(3)
    for node in net.nodes:
        node.seen, node.runs = node.seen._replace(launched=3, flying=1), node.rank != 2
    net.second()
    seconds(net, 100, lambda: net.events)
    assert [(host, "rank 2 does not run" in detail) for host, _, _, detail in net.events] == [("n3", True)]


def test_agents_that_were_stopped_with_their_ranks(net: Net) -> None:
    net.train(3)
    net.hold()
    net.second()
    net.now += 600.0
    assert seconds(net, 20, lambda: net.events) == 20, "they have just come back"


def test_messages_of_strangers_and_other_rounds(net: Net) -> None:
    net.train(3)
    net.hold()
    seconds(net, 60, lambda: net.events)
    standing = net.nodes[0].hangs._join_standings("default", net.now)
    assert standing is not None
    for node in net.nodes:
        node.training.hung = ""
    last = net.nodes[2]
    last.hangs.on_message(last.incarnation, "n1", peer.HungDown(3, "default", standing))
    last.hangs.on_message(last.incarnation, "n2", peer.HungDown(2, "default", standing))
    last.hangs.on_message(last.incarnation, "n2", peer.HungDown(3, "another", standing))
    assert not last.training.hung
    last.hangs.on_message(last.incarnation, "n2", peer.HungDown(3, "default", standing))
    assert last.training.hung
