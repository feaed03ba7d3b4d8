"""Slots asked for ahead while a shard outgrows its memory: none is handed out that the agent does not mean."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from waiting import until

from gemini_hpc.core.slots import Refused, SlotPair, Stamp
from gemini_hpc.format.slot_header import SlotLayout
from gemini_hpc.train.device.memory import TensorShardOwner
from gemini_hpc.train.nccl.driver import Carried
from gemini_hpc.train.nccl.receiver import Receiver
from gemini_hpc.train.nccl.slot_prefetch import SlotPrefetch
from gemini_hpc.train.nccl.streamed_replicator import StreamedReplicator
from gemini_hpc.train.replication.replicator import Counters
from gemini_hpc.train.state.capture import CaptureJob
from gemini_hpc.train.transport.base import Head
from gemini_hpc.wire import local


class Buffer:
    def __init__(self, size: int) -> None:
        self.bytes = torch.zeros(size, dtype=torch.uint8)


def memory(size: int = 64) -> Any:
    return SimpleNamespace(slots=[Buffer(size), Buffer(size)])


class Agent:
    """The agent's side of one shard, and the client in front of it."""

    def __init__(self) -> None:
        self.lost, self.page = False, None
        self.pair = SlotPair()
        self.begun: list[tuple[SlotPair, int]] = []
        self.before_begin: Callable[[], None] | None = None
        self.after_begin: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def request(self, m: local.Request, **_: Any) -> tuple[local.Message, list[int]]:
        with self._lock:
            if isinstance(m, local.Abort):
                if self.pair.slots[m.slot].stamp == Stamp(1, m.version):
                    self.pair.empty_slot(m.slot)
                return local.Ok(), []
            assert isinstance(m, local.BeginVersion)
            before, self.before_begin = self.before_begin, None
            if before is not None:
                before()
            try:
                index = self.pair.begin_version(Stamp(1, m.version), None, frozenset(), voted=frozenset())
            except Refused as exc:
                return local.Refused(exc.reason), []
            self.begun.append((self.pair, m.version))
            after, self.after_begin = self.after_begin, None
            if after is not None:
                after()
            return local.Begun(index), []


@contextmanager
def opened(agent: Agent, keeper: TensorShardOwner) -> Iterator[SlotPrefetch]:
    gate = SimpleNamespace(degraded=False, sealed=(1, 11))
    pin = SimpleNamespace(release=lambda: None)
    session: Any = SimpleNamespace(
        name="default", rank=0, world=2, homes=[0, 1], epoch=1, gate=gate, require_agent=lambda: agent
    )
    desk = SlotPrefetch(session, lambda _: (0, 8), lambda _: cast(Any, pin), pytest.fail)
    desk.open({0: keeper})
    try:
        yield desk
    finally:
        desk.end()
        desk.close(drained=True)


@pytest.mark.parametrize(
    "when", ["after", "before it is asked for", "while it is answered", "before it is known here"]
)
def test_a_slot_of_outgrown_memory_is_not_handed_out(when: str) -> None:
    agent, keeper = Agent(), TensorShardOwner()
    keeper.shard = memory()
    larger = memory(128)

    def registered() -> None:
        agent.pair = SlotPair()

    def known() -> None:
        keeper.outgrow(larger)

    def grown() -> None:
        registered()
        known()

    with opened(agent, keeper) as desk:
        if when == "before it is asked for":
            agent.before_begin = grown
        elif when == "while it is answered":
            agent.after_begin = grown
        elif when == "before it is known here":
            agent.before_begin, agent.after_begin = registered, None
        desk.set_wanted(13)
        until(lambda: bool(agent.begun), 10, 0.001, what="a slot is asked for")
        if when == "after":
            until(lambda: desk._shards[0].grant is not None, 10, 0.001, what="it is there")
            grown()
        elif when == "before it is known here":
            until(lambda: desk._shards[0].grant is not None, 10, 0.001, what="it is there")
            known()
        new = agent.pair

        def granted() -> bool:
            grant = desk._shards[0].grant
            return grant is not None and grant.slot in larger.slots

        until(granted, 10, 0.001, what="a slot of the larger memory")
        grant = desk.claim_slot(0, 13)
        assert grant is not None and grant.slot is larger.slots[grant.index]
        assert new.slots[grant.index].stamp == Stamp(1, 13), "the agent means the same one"


def test_a_version_that_goes_over_the_link_is_not_overtaken_by_what_is_asked_for_ahead() -> None:
    agent, keeper = Agent(), TensorShardOwner()
    keeper.shard = memory()
    with opened(agent, keeper) as desk:
        desk.record_step(16)
        until(lambda: bool(agent.begun), 10, 0.001, what="a slot is asked for")
        desk.hold_for_link(0, 16)  # it waits behind another for the thread that saves
        desk.set_wanted(17)
        desk.record_step(17)
        desk.record_end(0, 15)
        for _ in range(50):  # as often as the desk looks
            with desk._changed:
                desk._changed.notify_all()
            threading.Event().wait(0.002)
        assert [version for _, version in agent.begun] == [16]
        desk.record_end(0, 16)
        until(lambda: agent.begun[-1][1] == 17, 10, 0.001, what="the next one is asked for")


def test_a_version_whose_slot_has_been_outgrown_is_skipped_and_ends_nothing() -> None:
    said: list[tuple[str, int, str]] = []
    replicator = StreamedReplicator.__new__(StreamedReplicator)
    replicator.counters = Counters()
    replicator.shard = memory()
    parts: Any = replicator
    parts._layout, parts._driver = SlotLayout.plan(64, 64, 1 << 20), SimpleNamespace(wait_until_filled=lambda _: True)
    parts._session = SimpleNamespace(record_incident=lambda *words: said.append(words))
    job = CaptureJob(13, b"x" * 4096, [], cast(Any, None), [], None)
    slot = memory().slots[0]
    replicator._finish(job, Carried(job, cast(Any, SimpleNamespace(slot=slot, index=0)), cast(Any, None)))
    assert not job.saved and [(name, version) for name, version, _ in said] == [("skipped", 13)]


def test_a_holder_makes_larger_slots_when_it_hears_of_them_and_takes_nothing() -> None:
    answers: list[bool] = []
    asked: list[int] = []
    receiver = Receiver.__new__(Receiver)
    receiver.rank = 1
    parts: Any = receiver
    parts.shard = SimpleNamespace(total_bytes=64)
    parts._enlarge = asked.append
    parts._inbox = SimpleNamespace(answer=answers.append)
    parts._driver = SimpleNamespace(desk=SimpleNamespace(record_end=lambda *_: None))
    receiver._receive_version(Head(12, 0, 128, ()))
    receiver._receive_version(Head(12, 0, 64, ()))
    assert answers == [False, False] and asked == [128]
