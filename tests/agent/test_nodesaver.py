"""One node's part of a save: real slots, real processes that write; of the agent only what it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent.memory import Budget
from gemini_hpc.agent.nodesaver import NodeSaver
from gemini_hpc.agent.store import Shard, Store
from gemini_hpc.config import Settings
from gemini_hpc.core.directory import Row
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import version
from gemini_hpc.wire import peer
from tests.tier import slots

ROWS = (Row("model.w", "float32", (64, 16), True, "cpu"),)
STAMP = Stamp(2, 7)


class Node:
    """Node rank 1 of a job, with the shards of ranks 1 (its own) and 0."""

    def __init__(self, tier: Path) -> None:
        self.tier = str(tier)
        self.told: list[peer.DrainUp] = []
        self.budget = Budget(Settings())
        self.store = Store(self.budget)
        agent: Any = SimpleNamespace(
            job=7,
            node="n1",
            noderanks={"n0": 0, "n1": 1},
            store=self.store,
            budget=self.budget,
            settings=Settings(),
            detached=False,
            spawn=asyncio.ensure_future,
        )
        self.saver = NodeSaver(agent, self.told.append)

    async def hold(self, rank: int, home: int, stamp: Stamp = STAMP) -> Shard:
        made = slots.make(rank, 2, ROWS, [(0, (32 * rank, 0), (32, 16))], stamp=stamp)
        shard = await self.store.make("default", rank, 2, home, len(made.memory))
        index = shard.pair.begin(stamp, None, frozenset(), voted=frozenset())
        with shard.memory[index].view() as view:
            view[:] = made.view
        shard.pair.complete(index, stamp, made.digest(), made.used)
        return shard

    async def save(self, stamp: Stamp, attempt: int = 1) -> peer.DrainUp:
        """What it tells of it."""
        before = len(self.told)
        self.saver.wanted(peer.DrainDown(3, "default", (stamp.epoch, stamp.version), attempt), self.tier)
        async with asyncio.timeout(30):
            while len(self.told) == before:
                await asyncio.sleep(0.01)
        return self.told[-1]


def run(tier: Path, test: Callable[[Node], Awaitable[None]]) -> None:
    async def inside() -> None:
        node = Node(tier)
        try:
            await test(node)
        finally:
            node.saver.close()
            node.store.clear()

    asyncio.run(inside())


def test_what_is_at_home_here_is_written_and_told_again_when_asked_again(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        for rank in range(2):
            await node.hold(rank, home=rank)
        told = await node.save(STAMP)
        assert told.file is not None and [s.rank for s in told.file.shards] == [1] and told.host == "n1"
        assert node.saver.through("default") == told.file.bytes > 0
        assert (tmp_path / "gemini-7/default" / version.name(STAMP) / told.file.name).exists()
        assert await node.save(STAMP) is told, "not written again"
        other = await node.save(STAMP, attempt=2)
        assert other is not told and other.attempt == 2

    run(tmp_path, test)


def test_the_third_copy_goes_with_its_shard(tmp_path: Path) -> None:
    """A training that came back elsewhere, or was another size, left memory that nobody would use again."""

    async def test(node: Node) -> None:
        shard = await node.hold(1, home=1)
        without = node.budget.taken_bytes
        assert (await node.save(STAMP)).file is not None
        assert node.budget.taken_bytes == without + shard.bytes
        async with asyncio.timeout(10):
            while node.saver.busy:
                await asyncio.sleep(0.01)
        shard.home = 0
        node.saver.wanted(peer.DrainDown(3, "default", (2, 9), 5), node.tier)
        assert node.budget.taken_bytes == without

    run(tmp_path, test)


def test_a_version_that_is_no_longer_there_is_told(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.hold(1, home=1)
        told = await node.save(Stamp(2, 5))
        assert told.file is None and "rank 1 has gone past version 5" in told.reason

    run(tmp_path, test)


@pytest.mark.parametrize("tier", ["not-there", "file"])
def test_a_tier_that_is_not_there_is_told(tmp_path: Path, tier: str) -> None:
    (tmp_path / "file").write_text("")

    async def test(node: Node) -> None:
        await node.hold(1, home=1)
        told = await node.save(STAMP)
        assert told.file is None and str(tmp_path / tier) in told.reason and "director" in told.reason

    run(tmp_path / tier, test)
