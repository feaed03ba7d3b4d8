"""Closed trainings along the tree: who is counted, and whose word counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent.closed_trainings import ClosedTrainings
from gemini_hpc.agent.replicas.closings import Closings
from gemini_hpc.agent.replicas.pledges import Pledges
from gemini_hpc.core.sequence import Closed
from gemini_hpc.wire import peer

from .contexts import made_context

CLOSED = Closed("default", 9, 0, "run")


class Agent:
    """In round 3, with `n2` and `n3` below it."""

    def __init__(self, directory: Path, parent: str | None) -> None:
        self.sent: list[tuple[str, Any]] = []
        rounds = SimpleNamespace(round=3, parent=parent, children=("n2", "n3"), plan=None)
        self.incarnation: Any = SimpleNamespace(
            rounds=rounds, restart=0, live=True, leads=parent is None, send=self.send
        )
        self.incarnation.send_down = lambda m: [self.send(child, m) for child in rounds.children]
        here: Any = SimpleNamespace(incarnation=self.incarnation, live=self.incarnation, restart=0, epoch=5)
        self.closings = Closings(here, Pledges(str(directory)), lambda *_, **__: None)
        replicas: Any = SimpleNamespace(trainings=[], store=[], closings=self.closings)
        tier: Any = SimpleNamespace(saver=None, writer=None)
        self.trainings = ClosedTrainings(made_context(here), replicas, tier)

    def send(self, host: str, message: Any) -> bool:
        self.sent.append((host, message))
        return True

    def hear(self, host: str, message: Any) -> None:
        self.trainings.on_message(self.incarnation, host, message)


def count(ranks: int, *, number: int = 3) -> peer.ClosedUp:
    return peer.ClosedUp(number, "default", ranks, 4, 9, "run")


def test_the_root_counts_its_children(tmp_path: Path) -> None:
    root = Agent(tmp_path, None)
    for host, message in (("n2", count(2)), ("n3", count(1)), ("n9", count(4)), ("n3", count(2, number=2))):
        root.hear(host, message)
    assert not root.sent and not root.closings.all, "one of four has not closed it"
    root.hear("n3", count(2))
    assert root.sent == [(child, peer.ClosedDown(3, CLOSED)) for child in ("n2", "n3")]
    assert root.closings.all == Agent(tmp_path, None).closings.all == (CLOSED,), "also on disk"


def test_another_agent_adds_up_and_obeys_its_parent(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "n1")
    agent.hear("n2", count(2))
    agent.hear("n3", count(2))
    assert [(host, message.ranks) for host, message in agent.sent] == [("n1", 2), ("n1", 4)]
    assert not agent.closings.all
    for host, number in (("n2", 3), ("n9", 3), ("n1", 2)):
        agent.hear(host, peer.ClosedDown(number, CLOSED))
    assert not agent.closings.all
    agent.hear("n1", peer.ClosedDown(3, CLOSED))
    assert agent.closings.all == (CLOSED,) and agent.sent[-1] == ("n3", peer.ClosedDown(3, CLOSED))


@pytest.mark.parametrize("again", ["n1", "n2"])
def test_a_new_link_hears_it_again(tmp_path: Path, again: str) -> None:
    agent = Agent(tmp_path, "n1")
    agent.hear("n2", count(2))
    agent.hear("n1", peer.ClosedDown(3, CLOSED))
    agent.sent.clear()
    agent.trainings.on_link(agent.incarnation, again)
    assert [host for host, _ in agent.sent] == [again]
