"""Shards of this node: one `Shard` (two slots) for each training rank whose state the node keeps."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from gemini_hpc import clock
from gemini_hpc.agent.replicas.digest_pool import DigestPool, Urgency
from gemini_hpc.agent.replicas.memory import Budget, Memfd
from gemini_hpc.agent.replicas.parity import Parity, cover_alike
from gemini_hpc.agent.replicas.replica_fill import Fill
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.digest import Pieces
from gemini_hpc.core.moments import UNCOUNTED, Moment
from gemini_hpc.core.slots import Slot, SlotPair, Stamp
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.format.slot_header import HEADER_BYTES, read_moment

Key = tuple[str, int]


@dataclass(frozen=True)
class PendingDigest:
    """A pending digest of the leading `used` bytes of a slot in progress."""

    slot: Slot
    used: int
    pieces: Pieces
    found: asyncio.Future[str]


@dataclass
class Shard:
    """Both slots of one shard on this node.

    Attributes:
        training: Name of the training.
        rank: Rank whose state the shard is.
        world: Number of shards of the training.
        home: Node rank of the shard's home.
        bytes: Size of one slot.
        memory: Memory of both slots.
        pair: State of both slots.
        since: Times at which the slots were begun or completed, in seconds.
        verified: Times of the last verification of the slots, in seconds.
        registered_round: Last round in which a training rank registered the shard.
        resumed_round: Last round whose plan has the shard here.
        rescued_round: Round in which the shard was copied from live state.
        pushed: The home's agent fills the shard. A training rank here fills at most the parts that it has as
            well.
        fill: Newest version that a training rank here fills in part.
        unfilled: Newest version that the training rank here has not filled.
        unlike: Reason why the training rank here must not fill the shard; empty: it may.
        handed_back: Slots that a process has given to this agent after its predecessor's death.
        half_back: One slot is still to be handed back. The pair has no vote, and no other process writes to it.
        unproven: Stamp of a copy that is not proven, see `Copy`.
        parity: Set if this is not the shard, but the parity beside it.
        readings: Digests, by slot, of the slots that a process here fills.
    """

    training: str
    rank: int
    world: int
    home: int
    bytes: int
    memory: list[Memfd]
    pair: SlotPair = field(default_factory=SlotPair)
    since: list[float] = field(default_factory=lambda: [0.0, 0.0])
    verified: list[float] = field(default_factory=lambda: [0.0, 0.0])
    registered_round: int = 0
    resumed_round: int = 0
    rescued_round: int = 0
    pushed: bool = False
    fill: Fill | None = None
    unfilled: int = 0
    unlike: str = ""
    handed_back: frozenset[int] = frozenset()
    half_back: bool = False
    unproven: Stamp | None = None
    parity: Parity | None = None
    readings: list[PendingDigest | None] = field(default_factory=lambda: [None, None])

    def describe_copy(self, index: int) -> Copy | None:
        """Return the description of a complete slot, or None if the slot is not complete."""
        slot = self.pair.slots[index]
        if slot.state != "complete" or slot.stamp is None or slot.digest is None:
            return None
        return Copy(
            training=self.training,
            rank=self.rank,
            world=self.world,
            home=self.home,
            bytes=self.bytes,
            used=slot.bytes_used,
            stamp=slot.stamp,
            digest=slot.digest,
            proven=slot.stamp != self.unproven,
            members=self.parity.members[index] if self.parity is not None else (),
            blocks=self.parity.blocks if self.parity is not None else 1,
            room=self.parity.rooms[index] if self.parity is not None else 0,
            mark=slot.moment.mark,
        )

    def read_moment(self, index: int) -> Moment:
        """Return the moment that a slot's header names."""
        with self.memory[index].view() as memory:
            return read_moment(memory[:HEADER_BYTES]) if self.parity is None else UNCOUNTED

    def begin_copy(self, stamp: Stamp) -> int:
        """Begin a copy that this agent restores itself. Return the index of its slot, which is busy from here on.

        Raises:
            core.slots.Refused: No slot can take the version.
        """
        index = self.pair.begin_version(stamp, None, frozenset(), voted=frozenset())
        self.pair.slots[index].busy = True
        self.memory[index].commit(None)
        return index

    def complete_slot(self, index: int, found: Committed) -> None:
        """Complete a slot in progress whose bytes have been verified, and write its commit record."""
        self.pair.complete_slot(index, found.stamp, found.digest, found.used_bytes, self.read_moment(index))
        self.since[index] = self.verified[index] = clock.time()
        self.memory[index].commit(found)

    def verify_slot(self, index: int, digest: str) -> bool:
        """Compare a digest just read with the recorded one. A slot with another digest becomes void."""
        record = self.describe_copy(index)
        if record is None:
            return False
        if digest != record.digest:
            self.pair.empty_slot(index)
            return False
        self.verified[index] = clock.time()
        return True


class Store:
    """All shards of this node, and their memory."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.pool = DigestPool()
        self.shards: dict[Key, Shard] = {}
        self.parities: dict[Key, Shard] = {}  # parity of other shards, by the rank whose shard it is beside
        self.ancestors: list[Shard] = []
        self._making = defaultdict[tuple[bool, Key], asyncio.Lock](asyncio.Lock)  # by (is parity, shard)
        self._taking = asyncio.Semaphore(self.pool.size)  # slots whose pages are taken at the same time

    def __iter__(self) -> Iterator[Shard]:
        """Iterate over the shards, without parity."""
        yield from self.shards.values()
        yield from (shard for shard in self.ancestors if shard.parity is None)

    def list_all(self) -> list[Shard]:
        """Return all shards and parity."""
        return [*self.shards.values(), *self.parities.values(), *self.ancestors]

    def get(self, training_name: str, rank: int) -> Shard | None:
        """Return the current shard of a rank, or None."""
        return self.shards.get((training_name, rank))

    def list_shards(self, training_name: str) -> list[Shard]:
        """Return all current shards of a training."""
        return [s for s in self.shards.values() if s.training == training_name]

    def list_parities(self, training_name: str) -> list[Shard]:
        """Return all current parity of a training."""
        return [s for s in self.parities.values() if s.training == training_name]

    def find_version(
        self, training_name: str, rank: int, stamp: Stamp, *, parity: bool = False
    ) -> tuple[Shard, int] | None:
        """Return the shard and slot index of exactly this version, complete or in progress.

        Args:
            training_name: Name of the training.
            rank: Rank of the shard.
            stamp: The version.
            parity: Look for the parity beside that shard instead.
        """
        for shard in self.list_all():
            if (shard.training, shard.rank, shard.parity is not None) == (training_name, rank, parity):
                index = shard.pair.find_slot(stamp)
                if index is not None:
                    return shard, index
        return None

    async def make_shard(
        self,
        training_name: str,
        rank: int,
        world: int,
        home: int,
        size_bytes: int,
        *,
        parity: Parity | None = None,
        reserve: bool = True,
    ) -> Shard:
        """Create the two slots of a shard, and take their pages unless they are handed back.

        Memory of the same size is used again. A shard of the same rank but another size or world stays as an ancestor
        until a newer version is sealed: it may be the only copy.

        Args:
            training_name: Name of the training.
            rank: Rank whose shard it is.
            world: Number of shards of the training.
            home: Node rank of the shard's home.
            size_bytes: Size of one slot.
            parity: Set for the parity beside that shard: the shards that it covers.
            reserve: Take the pages of both slots.

        Raises:
            NoMemory: The memory does not suffice.
        """
        of = "" if parity is None else "parity "
        name, description = f"gemini:{training_name}:{of}{rank}", f"{of and 'parity beside the '}shard of rank {rank}"
        async with self._making[parity is not None, (training_name, rank)]:
            old = self._find_table(parity).get((training_name, rank))
            if old is not None and (old.bytes, old.world) == (size_bytes, world) and cover_alike(old.parity, parity):
                await self._restore_trimmed(old, name, description)
                old.home = home
                return old
            memory = await self._make_slots(name, description, size_bytes, 0, 1, reserve=reserve)
            shard = Shard(training_name, rank, world, home, size_bytes, memory, parity=parity)
            self.add_shard(shard)
            return shard

    def trim(self, shard: Shard, sealed: Stamp, abandoned: frozenset[Stamp]) -> None:
        """Free the slots that a closed training does not need any more.

        If its sealed version is here, empty slots, older versions and abandoned versions are freed. Otherwise all
        slots stay.
        """
        if shard.pair.find_slot(sealed) is None:
            return
        for index, slot in enumerate(shard.pair.slots):
            if shard.memory[index].fd >= 0 and (slot.stamp is None or slot.stamp < sealed or slot.stamp in abandoned):
                shard.pair.empty_slot(index)
                self.budget.free(shard.memory[index])

    async def _restore_trimmed(self, shard: Shard, name: str, description: str) -> None:
        """Take memory again for a trimmed slot.

        Raises:
            NoMemory: The memory does not suffice.
        """
        for index, memory in enumerate(shard.memory):
            if memory.fd < 0:
                slot = shard.pair.slots[index]
                slot.busy = True
                try:
                    (shard.memory[index],) = await self._make_slots(name, description, shard.bytes, index)
                finally:
                    slot.busy = False

    async def _reserve_pages(self, memory: Memfd) -> None:
        """Take all pages, beside those of other shards: a node has many, and one processor takes 2 to 3 GB a second.

        Raises:
            NoMemory: The memory does not suffice.
        """
        async with self._taking:
            await asyncio.to_thread(memory.take_pages, self.budget.measure_left_bytes)

    async def _make_slots(
        self, name: str, description: str, size_bytes: int, *indexes: int, reserve: bool = True
    ) -> list[Memfd]:
        with self.budget.hold(len(indexes) * size_bytes, description, present=not reserve) as made:
            made.extend(Memfd(f"{name}:{index}", size_bytes, slot=True) for index in indexes)
            if reserve:
                await asyncio.gather(*(self._reserve_pages(memory) for memory in made))
        return made

    async def adopt(
        self, training_name: str, rank: int, world: int, home: int, size_bytes: int, first: Memfd
    ) -> Shard:
        """Create a shard around existing memory, which becomes the first of its two slots.

        Raises:
            NoMemory: The memory does not suffice. The existing memory is closed then.
        """
        async with self._making[False, (training_name, rank)]:
            with self.budget.hold(2 * size_bytes, f"shard of rank {rank}", first, present=True) as made:
                made.append(Memfd(f"gemini:{training_name}:{rank}:1", size_bytes, slot=True))
                await self._reserve_pages(made[1])
            shard = Shard(training_name, rank, world, home, size_bytes, made)
            self.add_shard(shard)
            return shard

    def release_memory(self, shard: Shard, index: int) -> int:
        """Release a shard. Return a descriptor of one slot's memory for its new owner."""
        fd = os.dup(shard.memory[index].fd)
        self.drop(shard)
        return fd

    def add_shard(self, shard: Shard) -> None:
        """Add a shard. A shard of the same name becomes an ancestor."""
        key, held = (shard.training, shard.rank), self._find_table(shard.parity)
        old = held.get(key)
        if old is not None:
            if old.pair.list_complete_stamps():
                self.ancestors.append(old)
            else:
                self._close(old)
        held[key] = shard

    def _find_table(self, parity: Parity | None) -> dict[Key, Shard]:
        return self.shards if parity is None else self.parities

    def find_covering_parity(self, training_name: str, rank: int, round_number: int) -> Shard | None:
        """Return the parity here that covers this rank's shard, or None.

        Parity registered in this round comes first. Parity of another round may stem from ranks on other nodes.
        """
        found = [
            p for p in self.parities.values() if p.training == training_name and p.parity and rank in p.parity.homes
        ]
        return max(found, key=lambda p: p.registered_round == round_number, default=None)

    def drop(self, shard: Shard) -> None:
        """Free a shard that is not needed: a failed copy, or a copy of a closed training."""
        key, held = (shard.training, shard.rank), self._find_table(shard.parity)
        if held.get(key) is shard:
            del held[key]
            self._close(shard)
        elif shard in self.ancestors:
            self.ancestors.remove(shard)
            self._close(shard)

    def _close(self, shard: Shard) -> None:
        for memory in shard.memory:
            self.budget.free(memory)

    def drop_stale(self, training_name: str, round_number: int, world: int, sealed: Stamp) -> None:
        """Free ancestors and unregistered shards after a seal in this round.

        A shard stays if a rank of a training of this size has registered it. A shard copied from live state stays
        until a newer version is sealed. That copy may be the last one of its shard, also of the version that the last
        votes of the dead have sealed.
        """
        for shard in [s for s in self.ancestors if s.training == training_name]:
            successor = self._find_table(shard.parity).get((training_name, shard.rank))
            # A late seal may name a version that only the ancestor has. The successor's versions may never be sealed.
            if successor is None or sealed in successor.pair.list_complete_stamps():
                self.drop(shard)
        for shard in [*self.shards.values(), *self.parities.values()]:
            stays = shard.registered_round == round_number or (
                shard.rescued_round == round_number
                and any(slot.stamp is not None and slot.stamp >= sealed for slot in shard.pair.slots)
            )
            if shard.training == training_name and not (stays and shard.world == world):
                self.drop(shard)

    def clear(self) -> None:
        """Free all shards."""
        for shard in self.list_all():
            self.drop(shard)

    async def verify(self) -> list[Copy]:
        """Read every complete copy and parity again, all at once. Void and return the damaged ones."""
        found = await asyncio.gather(
            *(self._verify_slot(shard, index) for shard in self.list_all() for index in (0, 1))
        )
        return [copy for copy in found if copy is not None]

    async def _verify_slot(self, shard: Shard, index: int) -> Copy | None:
        record, slot = shard.describe_copy(index), shard.pair.slots[index]
        if record is None:
            return None
        digest = await self.pool.digest(shard.memory[index], record.used, urgency=Urgency.INVENTORY)
        is_same = shard.pair.slots[index] is not slot or shard.verify_slot(index, digest)
        return None if is_same else record

    def list_copies(self) -> list[Copy]:
        """Return the description of every complete copy and parity."""
        records = (shard.describe_copy(index) for shard in self.list_all() for index in (0, 1))
        return [r for r in records if r is not None]
