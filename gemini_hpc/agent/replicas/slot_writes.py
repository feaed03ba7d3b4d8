"""Slots in progress, filled by a training rank here or by a peer's push, under one set of rules (R1, R5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas.digest_pool import DigestPool, Urgency
from gemini_hpc.agent.replicas.store import PendingDigest, Shard
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.core.digest import Pieces
from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.format.commit_record import Committed


class SlotWrites:
    """The writes to this node's slots, from the permission to write to the verified copy. Runs on the event loop."""

    def __init__(
        self,
        context: AgentContext,
        trainings: Trainings,
        pool: DigestPool,
        on_complete: Callable[[Shard, int], None] = lambda shard, index: None,
    ) -> None:
        """Create the writes.

        Args:
            context: The agent's context.
            trainings: Trainings of this agent.
            pool: Threads that make the digests.
            on_complete: Called with the shard and index of each slot that becomes complete.
        """
        self._membership, self._log, self._spawn = context.membership, context.log, context.spawn
        self._trainings, self._pool, self._on_complete = trainings, pool, on_complete

    def begin_write(self, training: Training, shard: Shard, version: int) -> int:
        """Return the index of the slot to fill with this version of the current epoch.

        Raises:
            core.slots.Refused: No slot may be written to now.
        """
        sealing = training.sealing
        if sealing is None:
            raise Refused("a recovery round is under way")
        stamp = Stamp(self._membership.epoch, version)
        index = shard.pair.begin_version(stamp, training.sealed, sealing.decision.abandoned, voted=sealing.voted)
        shard.memory[index].commit(None)
        if (reading := shard.readings[index]) is not None:
            reading.found.cancel()
            shard.readings[index] = None
        shard.since[index] = clock.time()
        self._trainings.drop_load_copies(training)  # a rank saves only after every rank has loaded
        self._trainings.recount(shard.training)
        return index

    def may_seal_soon(self, training: Training, shard: Shard) -> bool:
        """Return whether a seal may free a slot soon: a version here is undecided, and seals are possible."""
        sealed, sealing = training.sealed or Stamp(0, 0), training.sealing
        is_undecided = any(
            slot.busy or (slot.state == "complete" and slot.stamp is not None and slot.stamp > sealed)
            for slot in shard.pair.slots
        )
        return is_undecided and sealing is not None and not sealing.degraded

    def begin_again(self, training: Training, shard: Shard, version: int) -> int:
        """Begin this version again after its previous writer has gone or has aborted. Return the slot's index.

        Raises:
            core.slots.Refused: No slot may be written to now.
        """
        stamp = Stamp(self._membership.epoch, version)
        for index, slot in enumerate(shard.pair.slots):
            if slot.stamp == stamp and slot.state == "filling" and not slot.busy:
                self.empty_slot(shard, index)
        return self.begin_write(training, shard, version)

    def pass_over(self, shard: Shard, version: int) -> None:
        """Record that the rank skipped this version.

        Without the record, two groups of ranks could save alternate versions forever and none would be sealed.
        """
        shard.pair.pass_over(Stamp(self._membership.epoch, version))
        self._trainings.recount(shard.training)

    def empty_slot(self, shard: Shard, index: int) -> None:
        """Void a slot that will not be completed."""
        shard.pair.empty_slot(index)
        self._trainings.recount(shard.training)

    def read(self, shard: Shard, index: int, used: int) -> PendingDigest:
        """Return the reading of the leading `used` bytes of a slot in progress, made once in the background.

        The writer guarantees that these bytes do not change any more. A caller that waits for the digest must shield
        the future.

        Raises:
            ValueError: The writer has named another number of bytes before.
        """
        slot, reading = shard.pair.slots[index], shard.readings[index]
        if reading is not None and reading.slot is slot:
            if reading.used != used:
                raise ValueError(f"{used} bytes used, after {reading.used}")
            return reading
        if reading is not None:
            reading.found.cancel()
        pieces = Pieces(used)
        hashing = self._pool.hash(shard.memory[index], pieces, 0, pieces.count, urgency=Urgency.OWN)
        reading = shard.readings[index] = PendingDigest(slot, used, pieces, asyncio.wrap_future(hashing))
        return reading

    def finish_write(self, shard: Shard, index: int, claimed: Committed) -> None:
        """Verify and complete a slot whose writer, a process here, reports that all bytes are written.

        Args:
            shard: The shard.
            index: Index of the slot. No process writes to it any more.
            claimed: The commit record. Its digest is empty at the shard's home, and the home's digest elsewhere.

        Raises:
            ValueError: The writer has named another number of bytes before.
        """
        found = self.read(shard, index, claimed.used_bytes).found
        shard.pair.slots[index].busy = True
        self._spawn(self._verify(shard, index, claimed, found))

    async def _verify(self, shard: Shard, index: int, claimed: Committed, reading: asyncio.Future[str]) -> None:
        found = await asyncio.shield(reading)
        self.complete_slot(shard, index, claimed if claimed.digest else claimed._replace(digest=found), found)

    def complete_slot(self, shard: Shard, index: int, claimed: Committed, found: str) -> bool:
        """Complete a slot with all bytes present if `found`, their digest, equals the claimed digest.

        Return whether the digests are equal. Otherwise the slot becomes void.
        """
        stamp, _, wanted = claimed
        slot = shard.pair.slots[index]
        if slot.state != "filling" or slot.stamp != stamp:
            return False
        if found == wanted:
            shard.complete_slot(index, claimed)
            self._on_complete(shard, index)
        else:
            shard.pair.empty_slot(index)
            self._log(
                "damaged",
                version=stamp.version,
                detail=f"shard {shard.rank}: the copy's digest differs after the transfer",
            )
        self._trainings.recount(shard.training)
        return found == wanted
