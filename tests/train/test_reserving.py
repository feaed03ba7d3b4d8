"""Memory before the first version: the agent takes it, and the rank maps it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemini_hpc.client.agent_connection import AgentRefused
from gemini_hpc.train import engine
from gemini_hpc.train.engine import RunningEngine

MOST_S = 10.0


class Slot:
    """A slot that knows whether it has been mapped, and before what."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.mapping, self.go_on = threading.Event(), threading.Event()

    def populate(self, *, awaited: bool = True) -> None:
        self.mapping.set()
        assert self.go_on.wait(MOST_S)
        self._log.append(self._name if awaited else f"{self._name}, slowly")


class Reserving:
    """A rank with its own shard and one that agents fill."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, on_device: bool) -> None:
        self.log, self.lost = list[str](), list[str]()
        self.slots = [Slot(self.log, "first"), Slot(self.log, "second")]
        self.other: Callable[[], None] = lambda: None
        own = SimpleNamespace(pushed=False, slots=self.slots, list_slots_by_age=lambda: self.slots)
        session = SimpleNamespace(
            rank=0,
            ending=False,
            end_protection=self.lost.append,
            verdict=SimpleNamespace(record_prepared=lambda: self.log.append("prepared")),
        )

        def register(session: Any, rank: int, size: int, *, pushed: bool = False) -> Any:
            if rank == 0:
                return own
            self.other()
            self.log.append("registered")
            return SimpleNamespace(pushed=True)

        def listen(shards: list[Any]) -> bool:
            self.log.append(f"listening to {len(shards)}")
            return True

        monkeypatch.setattr(engine, "register", register)
        monkeypatch.setattr(engine, "Reserved", SimpleNamespace)
        monkeypatch.setattr(engine.priority, "lower", lambda: self.log.append("behind the training"))
        self._engine = SimpleNamespace(
            _session=session,
            replicator=SimpleNamespace(pin=lambda shard: self.log.append("pinned")),
            plan=SimpleNamespace(capture=SimpleNamespace(on_device=on_device)),
            _parity=None,
            receivers=[SimpleNamespace(rank=1)],
            _recognise=lambda shard: None,
            _listen=listen,
        )

    def run(self) -> None:
        RunningEngine._reserve(cast(Any, self._engine), [1 << 20, 1 << 20])


def test_own_memory_is_mapped_while_the_agent_takes_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot that is filled first comes first; the other one comes when the training is protected."""
    rank = Reserving(monkeypatch, on_device=False)

    def other() -> None:
        assert rank.slots[0].mapping.wait(MOST_S), "in progress already"
        assert not rank.slots[1].mapping.is_set()
        for slot in rank.slots:
            slot.go_on.set()

    rank.other = other
    rank.run()
    assert sorted(rank.log[:2]) == ["first", "registered"]
    assert rank.log[2:] == ["pinned", "listening to 2", "prepared", "behind the training", "second, slowly"]


def test_a_device_waits_for_both_slots_which_are_mapped_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Reserving(monkeypatch, on_device=True)

    def other() -> None:
        assert all(slot.mapping.wait(MOST_S) for slot in rank.slots)
        for slot in rank.slots:
            slot.go_on.set()

    rank.other = other
    rank.run()
    assert sorted(rank.log[:3]) == ["first", "registered", "second"]
    assert rank.log[3:6] == ["pinned", "listening to 2", "prepared"]


def test_no_thread_is_left_in_memory_when_the_agent_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would abort if it ended meanwhile: whoever waits for the reservation waits for them, too."""
    rank = Reserving(monkeypatch, on_device=False)

    def other() -> None:
        threading.Timer(0.1, rank.slots[0].go_on.set).start()
        raise AgentRefused("not enough memory")

    rank.other = other
    rank.run()
    assert rank.log == ["first", "listening to 0"]
    assert rank.lost == ["not enough memory"]
