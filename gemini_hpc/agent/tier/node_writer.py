"""One node's part of a save: the shards whose home it is, into a file of the tier, and those of missing nodes of
which it has copies, if it is told so, into the files that these would have written.

They are first copied into slots of their own, which takes less than the training needs until it may write there again
(two versions later, R1); a copy that came too late is noticed by its digest. A process of its own then writes the
file, slowly.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from gemini_hpc.agent.peers.identity import Identity
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.tasks import Spawn
from gemini_hpc.agent.replicas.memory import Memfd, NoMemory
from gemini_hpc.agent.replicas.store import Shard, Store
from gemini_hpc.agent.tier import worker_process
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import orders
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.wire.stored import NodeFile

_COPY_BYTES = 16 << 20


Told = Callable[[tuple[NodeFile, ...], str], None]  # what has been written, and why not all of it or ""


@dataclass(frozen=True)
class Wanted:
    """A version that is to be saved. attempt: of several saves of it, which. homes: node ranks whose shards are
    written here, None: this node's own."""

    set: str
    stamp: Stamp
    attempt: int
    homes: frozenset[int] | None = None


class NodeWriter:
    """One agent's."""

    def __init__(self, identity: Identity, membership: Membership, store: Store, spawn: Spawn) -> None:
        self._identity, self._membership, self._store, self._spawn = identity, membership, store, spawn
        self._copies: dict[tuple[str, int], Memfd] = {}
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, Wanted] = {}  # what is being saved here, or was last,
        self._told: dict[str, tuple[tuple[NodeFile, ...], str]] = {}  # and what became of it
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
        self.cancel()
        for memory in self._copies.values():
            memory.close()
        self._copies.clear()

    def cancel(self) -> None:
        """What is being written is not wanted any more."""
        for task in self._saving.values():
            task.cancel()

    def forget(self, name: str) -> None:
        """Free the copies for the saves of a set, unless one is under way."""
        task = self._saving.get(name)
        if task is None or task.done():
            for key in [key for key in self._copies if key[0] == name]:
                self._free(key)

    async def cut_short(self) -> list[Wanted]:
        """After `close`: what was being written then, once nobody writes any more."""
        if self._saving:
            await asyncio.wait(self._saving.values())
        return [self._begun[name] for name, task in self._saving.items() if task.cancelled()]

    def wanted(self, what: Wanted, tier: str, told: Told) -> bool:
        """Save this version in `tier`; what has become of it is told, again where it is wanted again. False where
        there is nothing of it to be saved here."""
        name = what.set
        self._drop_stale()
        files = self._files(what)
        if not files:
            return False
        before = self._saving.get(name)
        if self._begun.get(name) == what:
            if name in self._told:
                told(*self._told[name])  # again: it may have been lost with an agent on its way
        else:
            if before is not None:
                before.cancel()  # whoever wanted that version has given it up, or there would be no other
            self._begun[name] = what
            self._told.pop(name, None)
            self._written[name] = 0
            self._saving[name] = self._spawn(self._save(what, tier, files, before, told))
        return True

    @property
    def _mine(self) -> int | None:
        """This node's rank."""
        return self._membership.noderanks.get(self._identity.node)

    def _files(self, what: Wanted) -> dict[int, list[Shard]]:
        """The shards that this node has to save, by their home."""
        found, mine = dict[int, list[Shard]](), self._mine
        if what.homes is None:
            own = [shard for shard in self._store.of_set(what.set) if shard.home == mine]
            return {mine: own} if own and mine is not None else {}
        for shard in self._store:  # also of a training that has grown since
            ranks = {other.rank for other in found.get(shard.home, ())}
            wanted = shard.set == what.set and shard.home in what.homes and shard.rank not in ranks
            if wanted and what.stamp in shard.pair.complete_stamps():
                found.setdefault(shard.home, []).append(shard)
        return found

    async def _save(
        self,
        what: Wanted,
        tier: str,
        files: dict[int, list[Shard]],
        before: asyncio.Task[None] | None,
        told: Told,
    ) -> None:
        if before is not None:  # it reads the copies that are made now
            await asyncio.wait([before])
        written: list[NodeFile] = []
        reason = ""
        copies: dict[int, list[orders.Source]] = {}
        try:
            for home in sorted(files):
                copies[home] = []
                for shard in files[home]:
                    copies[home].append(await self._copy(shard, what.stamp))
            for home, sources in copies.items():
                written.append(await self._write(what, tier, home, sources, sum(file.bytes for file in written)))
        except (TierFailed, NoMemory, OSError, ValueError) as error:
            reason = str(error)
        finally:
            for sources in copies.values():
                for source in sources:
                    os.close(source.fd)
        self._told[what.set] = tuple(written), reason
        told(tuple(written), reason)

    async def _write(
        self, what: Wanted, tier: str, home: int, sources: list[orders.Source], before_bytes: int
    ) -> NodeFile:
        """One file. Raises `TierFailed`."""
        settings = self._identity.settings
        order = orders.Write(
            tier,
            self._identity.job,
            what.set,
            what.stamp,
            home,
            tuple(sources),
            settings.tier_bytes_per_s,
            settings.tier_compress,
            key=self._membership.key,
            cluster=self._membership.cluster,
        )

        def through(count: int) -> None:
            self._written[what.set] = before_bytes + count

        answer = await worker_process.carry_out(order, [source.fd for source in sources], through)
        if not isinstance(answer, orders.Written):
            raise TierFailed("the tier process gave an unexpected answer")
        through(answer.file.bytes)
        return answer.file

    async def _copy(self, shard: Shard, stamp: Stamp) -> orders.Source:
        """The shard's version in a slot of its own. Raises `TierFailed`, `NoMemory`."""
        index = shard.pair.find(stamp)
        record = shard.record(index) if index is not None else None
        if index is None or record is None:
            raise TierFailed(f"rank {shard.rank} no longer holds version {stamp.version}")
        if self._membership.detached:  # nobody writes there any more
            fd = os.dup(shard.memory[index].fd)  # the slot itself may be given up meanwhile
            return orders.Source(fd, shard.rank, shard.home, shard.bytes, record.used, record.digest)
        memory = await self._memory(shard)
        await asyncio.to_thread(_copy, shard.memory[index].fd, memory, record.used)
        return orders.Source(os.dup(memory.fd), shard.rank, shard.home, shard.bytes, record.used, record.digest)

    def _drop_stale(self) -> None:
        """Copies of shards that are no longer at home here."""
        mine = self._mine
        for key in list(self._copies):
            name, rank = key
            task = self._saving.get(name)
            here = any(shard.rank == rank and shard.home == mine for shard in self._store.of_set(name))
            if not here and (task is None or task.done()):
                self._free(key)

    def _free(self, key: tuple[str, int]) -> None:
        memory = self._copies.pop(key)
        memory.close()
        self._store.budget.give(memory.size_bytes)

    async def _memory(self, shard: Shard) -> Memfd:
        key, budget = (shard.set, shard.rank), self._store.budget
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
                raise TierFailed("a slot is shorter than its record says")
            at += count
