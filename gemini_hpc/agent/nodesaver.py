"""One node's part of a save: the shards whose home it is, into a file of the tier.

They are first copied into slots of their own, which takes less than the training needs until it may write there again
(two versions later, R1); a copy that came too late is noticed by its digest. A process of its own then writes the
file, slowly.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from gemini_hpc.agent import tierwork
from gemini_hpc.agent.memory import Memfd, NoMemory
from gemini_hpc.agent.store import Shard
from gemini_hpc.agent.tierwork import TierFailed
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import orders
from gemini_hpc.wire import peer
from gemini_hpc.wire.stored import NodeFile

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent

_COPY_BYTES = 16 << 20


class NodeSaver:
    """One agent's. told: called with what has become of a version here."""

    def __init__(self, agent: Agent, told: Callable[[peer.DrainUp], None]) -> None:
        self._agent, self._told_to = agent, told
        self._copies: dict[tuple[str, int], Memfd] = {}
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, peer.DrainDown] = {}  # what is being saved here, or was last,
        self._told: dict[str, peer.DrainUp] = {}  # and what became of it
        self._written: dict[str, int] = {}

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return any(not task.done() for task in self._saving.values())

    def through(self, name: str) -> int:
        """Bytes of a set that have been written, of the save that was begun last."""
        return self._written.get(name, 0)

    def close(self) -> None:
        """Free everything; processes end."""
        for task in self._saving.values():
            task.cancel()
        for memory in self._copies.values():
            memory.close()
        self._copies.clear()

    def wanted(self, message: peer.DrainDown, tier: str) -> None:
        """The root wants this version saved in `tier`."""
        agent = self._agent
        name, stamp = message.set, Stamp(*message.stamp)
        mine = agent.noderanks[agent.node]
        self._drop_stale(mine)
        shards = [shard for shard in agent.store.of_set(name) if shard.home == mine]
        if not shards:
            return
        before, told = self._saving.get(name), self._told.get(name)
        if self._begun.get(name) == message:
            if told is not None and told.attempt == message.attempt:
                self._told_to(told)  # again: it may have been lost with an agent on its way
        else:
            if before is not None:
                before.cancel()  # the root has given that version up, or there would be no other
            self._begun[name] = message
            self._saving[name] = agent.spawn(self._save(message, tier, stamp, mine, shards, before))

    def _tell(self, message: peer.DrainDown, file: NodeFile | None, reason: str = "") -> None:
        told = peer.DrainUp(
            message.round, message.set, message.stamp, self._agent.node, file, reason, message.attempt
        )
        self._told[message.set] = told
        self._told_to(told)

    async def _save(
        self,
        message: peer.DrainDown,
        tier: str,
        stamp: Stamp,
        mine: int,
        shards: list[Shard],
        before: asyncio.Task[None] | None,
    ) -> None:
        agent = self._agent
        sources: list[orders.Source] = []
        if before is not None:  # it reads the copies that are made now
            await asyncio.wait([before])
        try:
            for shard in shards:
                sources.append(await self._copy(shard, stamp))
            order = orders.Write(
                tier,
                agent.job,
                message.set,
                message.stamp,
                mine,
                tuple(sources),
                agent.settings.tier_bytes_per_s,
                agent.settings.tier_compress,
            )
            self._written[message.set] = 0
            answer = await tierwork.carry_out(
                order, [source.fd for source in sources], lambda count: self._written.update({message.set: count})
            )
            if not isinstance(answer, orders.Written):
                raise TierFailed("its process has answered something else")
            self._written[message.set] = answer.file.bytes
            self._tell(message, answer.file)
        except (TierFailed, NoMemory, OSError, ValueError) as error:
            self._tell(message, None, str(error))

    async def _copy(self, shard: Shard, stamp: Stamp) -> orders.Source:
        """The shard's version in a slot of its own. Raises `TierFailed`, `NoMemory`."""
        index = shard.pair.find(stamp)
        record = shard.record(index) if index is not None else None
        if index is None or record is None:
            raise TierFailed(f"rank {shard.rank} has gone past version {stamp.version}")
        if self._agent.detached:  # nobody writes there any more
            return orders.Source(
                shard.memory[index].fd, shard.rank, shard.home, shard.bytes, record.used, record.digest
            )
        memory = await self._memory(shard)
        await asyncio.to_thread(_copy, shard.memory[index].fd, memory, record.used)
        return orders.Source(memory.fd, shard.rank, shard.home, shard.bytes, record.used, record.digest)

    def _drop_stale(self, mine: int) -> None:
        """Copies of shards that are no longer at home here."""
        for key in list(self._copies):
            name, rank = key
            task = self._saving.get(name)
            here = any(shard.rank == rank and shard.home == mine for shard in self._agent.store.of_set(name))
            if not here and (task is None or task.done()):
                self._free(key)

    def _free(self, key: tuple[str, int]) -> None:
        memory = self._copies.pop(key)
        memory.close()
        self._agent.budget.give(memory.size_bytes)

    async def _memory(self, shard: Shard) -> Memfd:
        key, budget = (shard.set, shard.rank), self._agent.budget
        found = self._copies.get(key)
        if found is not None and found.size_bytes == shard.bytes:
            return found
        if found is not None:
            self._free(key)
        budget.take(shard.bytes, f"a third copy of the shard of rank {shard.rank}, for the tier")
        memory = Memfd(f"gemini:tier:{shard.rank}", shard.bytes)
        try:
            await asyncio.to_thread(memory.reserve, budget.left_bytes)
        except BaseException:
            memory.close()
            budget.give(shard.bytes)
            raise
        self._copies[key] = memory
        return memory


def _copy(fd: int, into: Memfd, used_bytes: int) -> None:
    """The first bytes of a slot, while others may write there; the GIL is free meanwhile. Raises OSError."""
    with into.view() as view:
        at = 0
        while at < used_bytes:
            count = os.preadv(fd, [view[at : min(used_bytes, at + _COPY_BYTES)]], at)
            if not count:
                raise TierFailed("a slot is shorter than it says")
            at += count
