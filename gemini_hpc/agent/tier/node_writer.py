"""Writer of one node's part of a save.

The node writes the shards whose home it is into a file of the tier. On order it also writes its copies of missing
nodes' shards, into the files that these nodes would have written.

The shards are first copied into slots of their own. The copy takes less time than the training needs until it may
write to the slot again (two versions later, R1). The digest reveals a copy that came too late. A separate process
then writes the file, slowly.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas.memory import Memfd, NoMemory
from gemini_hpc.agent.replicas.store import Shard, Store
from gemini_hpc.agent.tier import worker_process
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import orders
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.wire.stored import NodeFile

_COPY_BYTES = 16 << 20


Told = Callable[[tuple[NodeFile, ...], str], None]  # files written, and why any are missing or ""


@dataclass(frozen=True)
class WantedVersion:
    """A version that is to be saved.

    Attributes:
        training: Name of the training.
        stamp: The version.
        attempt: Number that distinguishes several saves of a version.
        homes: Node ranks whose shards are written here. None means this node's own.
    """

    training: str
    stamp: Stamp
    attempt: int
    homes: frozenset[int] | None = None


class NodeWriter:
    """The writer of one agent."""

    def __init__(self, context: AgentContext, store: Store) -> None:
        self._identity, self._membership, self._spawn = context.identity, context.membership, context.spawn
        self._store = store
        self._copies: dict[tuple[str, int], Memfd] = {}
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, WantedVersion] = {}  # the current or last save,
        self._outcomes: dict[str, tuple[tuple[NodeFile, ...], str]] = {}  # and its outcome
        self._written: dict[str, int] = {}

    @property
    def busy(self) -> bool:
        """Return whether a file is being written."""
        return any(not task.done() for task in self._saving.values())

    def count_written_bytes(self, name: str) -> int:
        """Return the bytes written so far in a training's last save."""
        return self._written.get(name, 0)

    def close(self) -> None:
        """Free all copies and end the processes."""
        self.cancel()
        for memory in self._copies.values():
            memory.close()
        self._copies.clear()

    def cancel(self) -> None:
        """Cancel the writes in progress, which are not needed any more."""
        for task in self._saving.values():
            task.cancel()

    def forget(self, name: str) -> None:
        """Free the copies for the saves of a training, unless a save is in progress."""
        task = self._saving.get(name)
        if task is None or task.done():
            for key in [key for key in self._copies if key[0] == name]:
                self._free(key)

    async def wait_cut_short(self) -> list[WantedVersion]:
        """Return the saves that `close` has cancelled, after all writes have ended."""
        if self._saving:
            await asyncio.wait(self._saving.values())
        return [self._begun[name] for name, task in self._saving.items() if task.cancelled()]

    def begin_save(self, version: WantedVersion, tier: str, on_outcome: Told) -> bool:
        """Save this version. Return False if this node has no shard to save.

        Args:
            version: The version.
            tier: Directory of the tier.
            on_outcome: Called with the outcome. A repeated order gets the outcome again.
        """
        name = version.training
        self._drop_stale()
        files = self._find_shards(version)
        if not files:
            return False
        before = self._saving.get(name)
        if self._begun.get(name) == version:
            if name in self._outcomes:
                on_outcome(*self._outcomes[name])  # resend: the report may have been lost with an agent on its way
        else:
            if before is not None:
                before.cancel()  # the older version has been abandoned, or there would be no newer order
            self._begun[name] = version
            self._outcomes.pop(name, None)
            self._written[name] = 0
            self._saving[name] = self._spawn(self._save(version, tier, files, before, on_outcome))
        return True

    @property
    def _mine(self) -> int | None:
        """Return this node's rank."""
        return self._membership.noderanks.get(self._identity.node)

    def _find_shards(self, version: WantedVersion) -> dict[int, list[Shard]]:
        """Return the shards that this node must save, by their home."""
        found, own_noderank = dict[int, list[Shard]](), self._mine
        if version.homes is None:
            own = [shard for shard in self._store.list_shards(version.training) if shard.home == own_noderank]
            return {own_noderank: own} if own and own_noderank is not None else {}
        for shard in self._store:  # includes ancestors of a training that has grown since
            ranks = {other.rank for other in found.get(shard.home, ())}
            wanted = shard.training == version.training and shard.home in version.homes and shard.rank not in ranks
            if wanted and version.stamp in shard.pair.list_complete_stamps():
                found.setdefault(shard.home, []).append(shard)
        return found

    async def _save(
        self,
        version: WantedVersion,
        tier: str,
        files: dict[int, list[Shard]],
        earlier: asyncio.Task[None] | None,
        on_outcome: Told,
    ) -> None:
        if earlier is not None:  # the older save still reads the copies that are overwritten now
            await asyncio.wait([earlier])
        written: list[NodeFile] = []
        reason = ""
        copies: dict[int, list[orders.Source]] = {}
        try:
            for home in sorted(files):
                copies[home] = []
                for shard in files[home]:
                    copies[home].append(await self._copy(shard, version.stamp))
            for home, sources in copies.items():
                written.append(await self._write(version, tier, home, sources, sum(file.bytes for file in written)))
        except (TierFailed, NoMemory, OSError, ValueError) as error:
            reason = str(error)
        finally:
            for sources in copies.values():
                for source in sources:
                    os.close(source.fd)
        self._outcomes[version.training] = tuple(written), reason
        on_outcome(tuple(written), reason)

    async def _write(
        self, version: WantedVersion, tier: str, home: int, sources: list[orders.Source], before_bytes: int
    ) -> NodeFile:
        """Write one file.

        Raises:
            TierFailed: The tier process reports a failure.
        """
        settings = self._identity.settings
        order = orders.Write(
            tier,
            self._identity.job,
            version.training,
            version.stamp,
            home,
            tuple(sources),
            settings.tier_bytes_per_s,
            settings.tier_compress,
            key=self._membership.key,
            cluster=self._membership.cluster,
        )

        def record_written(count: int) -> None:
            self._written[version.training] = before_bytes + count

        answer = await worker_process.carry_out(order, [source.fd for source in sources], record_written)
        if not isinstance(answer, orders.Written):
            raise TierFailed("the tier process gave an unexpected answer")
        record_written(answer.file.bytes)
        return answer.file

    async def _copy(self, shard: Shard, stamp: Stamp) -> orders.Source:
        """Copy the shard's version to a slot of its own.

        After the job's end the slot itself serves.

        Raises:
            TierFailed: The shard does not hold the version any more.
            NoMemory: The memory for the copy does not suffice.
        """
        index = shard.pair.find_slot(stamp)
        record = shard.describe_copy(index) if index is not None else None
        if index is None or record is None:
            raise TierFailed(f"rank {shard.rank} no longer holds version {stamp.version}")
        if self._membership.detached:  # no process writes to the slot any more
            fd = os.dup(shard.memory[index].fd)  # the slot itself may be freed meanwhile
            return orders.Source(fd, shard.rank, shard.home, shard.bytes, record.used, record.digest)
        memory = await self._reserve_memory(shard)
        await asyncio.to_thread(_copy, shard.memory[index].fd, memory, record.used)
        return orders.Source(os.dup(memory.fd), shard.rank, shard.home, shard.bytes, record.used, record.digest)

    def _drop_stale(self) -> None:
        """Free copies of shards whose home is no longer here."""
        own_noderank = self._mine
        for key in list(self._copies):
            name, rank = key
            task = self._saving.get(name)
            is_home = any(
                shard.rank == rank and shard.home == own_noderank for shard in self._store.list_shards(name)
            )
            if not is_home and (task is None or task.done()):
                self._free(key)

    def _free(self, key: tuple[str, int]) -> None:
        self._store.budget.free(self._copies.pop(key))

    async def _reserve_memory(self, shard: Shard) -> Memfd:
        key, budget = (shard.training, shard.rank), self._store.budget
        found = self._copies.get(key)
        if found is not None and found.size_bytes == shard.bytes:
            return found
        if found is not None:
            self._free(key)
        with budget.hold(shard.bytes, f"a third copy of the shard of rank {shard.rank}, for the tier") as made:
            made.append(Memfd(f"gemini:tier:{shard.rank}", shard.bytes))
            await asyncio.to_thread(made[0].reserve, budget.measure_left_bytes)
        self._copies[key] = made[0]
        return made[0]


def _copy(fd: int, into: Memfd, used_bytes: int) -> None:
    """Copy the first bytes of a slot, while a process may write to it. The GIL is free meanwhile.

    Raises:
        OSError: The slot cannot be read.
        TierFailed: The slot is shorter than its record says.
    """
    with into.view() as view:
        at = 0
        while at < used_bytes:
            count = os.preadv(fd, [view[at : min(used_bytes, at + _COPY_BYTES)]], at)
            if not count:
                raise TierFailed("a slot is shorter than its record says")
            at += count
