"""One node's part of a save: real slots, real processes that write; of the agent only what it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.memory import Budget
from gemini_hpc.agent.replicas.store import Shard, Store
from gemini_hpc.agent.tier import worker_process, workers
from gemini_hpc.agent.tier.node_writer import NodeWriter, WantedVersion
from gemini_hpc.config import Settings
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.shard_manifest import TensorRow
from gemini_hpc.tier import version
from gemini_hpc.wire.stored import NodeFile
from tests.agent.supervising import supervisor
from tests.tier import slots

from .contexts import made_context

ROWS = (TensorRow("model.w", "float32", (64, 16), True, "cpu"),)
STAMP = Stamp(2, 7)
Told = tuple[tuple[NodeFile, ...], str]


class Node:
    """Node rank 1 of a job, with the shards of ranks 1 (its own) and 0."""

    def __init__(self, tier: Path) -> None:
        self.tier = str(tier)
        self.told: list[Told] = []
        self.budget = Budget(Settings())
        self.store = Store(self.budget)
        membership = Membership()
        membership.noderanks, membership.detached = {"n0": 0, "n1": 1}, False
        self.saver = NodeWriter(made_context(membership), self.store)

    async def hold(self, rank: int, home: int, stamp: Stamp = STAMP) -> Shard:
        made = slots.make(rank, 2, ROWS, [(0, (32 * rank, 0), (32, 16))], stamp=stamp)
        shard = await self.store.make_shard("default", rank, 2, home, len(made.memory))
        index = shard.pair.begin_version(stamp, None, frozenset(), voted=frozenset())
        with shard.memory[index].view() as view:
            view[:] = made.view
        shard.pair.complete_slot(index, stamp, made.digest(), made.used)
        return shard

    def want(self, stamp: Stamp, attempt: int = 1, homes: frozenset[int] | None = None) -> bool:
        what = WantedVersion("default", stamp, attempt, homes)
        return self.saver.begin_save(what, self.tier, lambda files, reason: self.told.append((files, reason)))

    async def save(self, stamp: Stamp, attempt: int = 1, homes: frozenset[int] | None = None) -> Told:
        """What it tells of it."""
        before = len(self.told)
        assert self.want(stamp, attempt, homes)
        async with asyncio.timeout(30):
            while len(self.told) == before:
                await asyncio.sleep(0.01)
        return self.told[-1]


@pytest.fixture(autouse=True)
def _supervised() -> Iterator[None]:
    """What writes is forked, as for an agent."""
    with supervisor(workers.run_tier_worker) as (channel, _):
        worker_process.use(channel)
        yield
    worker_process._supervisor.clear()


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
        (file,), reason = await node.save(STAMP)
        assert not reason and [s.rank for s in file.shards] == [1] and file.name == "node-0001.h5"
        assert node.saver.count_written_bytes("default") == file.bytes > 0
        directory = tmp_path / "gemini-7/default" / version.format_name(STAMP)
        written = (directory / file.name).stat().st_mtime_ns
        assert await node.save(STAMP) == ((file,), "")
        assert (directory / file.name).stat().st_mtime_ns == written, "not written again"
        await node.save(STAMP, attempt=2)
        assert (directory / file.name).stat().st_mtime_ns > written

    run(tmp_path, test)


def test_a_missing_node_has_its_file_written_by_a_holder(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        for rank in range(2):
            await node.hold(rank, home=rank)
        files, reason = await node.save(STAMP, homes=frozenset({0, 1}))
        assert not reason and [(f.name, [(s.rank, s.home) for s in f.shards]) for f in files] == [
            ("node-0000.h5", [(0, 0)]),
            ("node-0001.h5", [(1, 1)]),
        ]
        assert node.saver.count_written_bytes("default") == sum(f.bytes for f in files)

    run(tmp_path, test)


def test_nothing_is_written_of_what_another_writes(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.hold(0, home=0)
        assert not node.want(STAMP) and not node.told and not (tmp_path / "gemini-7").exists()

    run(tmp_path, test)


def test_the_third_copy_goes_with_its_shard(tmp_path: Path) -> None:
    """A training that came back elsewhere, or was another size, left memory that nobody would use again."""

    async def test(node: Node) -> None:
        shard = await node.hold(1, home=1)
        without = node.budget.taken_bytes
        assert (await node.save(STAMP))[1] == ""
        assert node.budget.taken_bytes == without + shard.bytes
        async with asyncio.timeout(10):
            while node.saver.busy:
                await asyncio.sleep(0.01)
        shard.home = 0
        node.want(Stamp(2, 9), attempt=5)
        assert node.budget.taken_bytes == without

    run(tmp_path, test)


def test_a_version_that_is_no_longer_there_is_told(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.hold(1, home=1)
        files, reason = await node.save(Stamp(2, 5))
        assert not files and "rank 1 no longer holds version 5" in reason

    run(tmp_path, test)


@pytest.mark.parametrize("tier", ["not-there", "file"])
def test_a_tier_that_is_not_there_is_told(tmp_path: Path, tier: str) -> None:
    (tmp_path / "file").write_text("")

    async def test(node: Node) -> None:
        await node.hold(1, home=1)
        files, reason = await node.save(STAMP)
        assert not files and str(tmp_path / tier) in reason and "director" in reason

    run(tmp_path / tier, test)
