"""Slots that are being filled, by a training rank here or by a peer's push: one set of rules for both (R1, R5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gemini_hpc import clock
from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.tasks import Spawn
from gemini_hpc.agent.replicas.digest_pool import DigestPool, Urgency
from gemini_hpc.agent.replicas.store import Reading, Shard
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.format.commit_record import Committed


class SlotWrites:
    """From the word that a slot may be written to, to its verified copy. On the event loop."""

    def __init__(
        self,
        membership: Membership,
        sets: Trainings,
        log: Log,
        spawn: Spawn,
        pool: DigestPool,
        completed: Callable[[Shard, int], None] = lambda shard, index: None,
    ) -> None:
        """completed: told of each slot that has become complete."""
        self._membership, self._sets, self._log, self._spawn = membership, sets, log, spawn
        self._pool, self._completed = pool, completed

    def begin(self, training: Training, shard: Shard, version: int) -> int:
        """Index of the slot to fill with this version of the epoch. Raises `core.slots.Refused`."""
        sealing = training.sealing
        if sealing is None:
            raise Refused("a recovery round is under way")
        stamp = Stamp(self._membership.epoch, version)
        index = shard.pair.begin(stamp, training.sealed, sealing.word.abandoned, voted=sealing.voted)
        shard.memory[index].commit(None)
        if (reading := shard.readings[index]) is not None:
            reading.found.cancel()
            shard.readings[index] = None
        shard.since[index] = clock.time()
        self._sets.drop_guests(training)  # every rank has loaded, or none would have come as far as a save
        self._sets.recount(shard.set)
        return index

    def begin_again(self, training: Training, shard: Shard, version: int) -> int:
        """The same where whoever filled it has gone, or has given up. Raises `core.slots.Refused`."""
        stamp = Stamp(self._membership.epoch, version)
        for index, slot in enumerate(shard.pair.slots):
            if slot.stamp == stamp and slot.state == "filling" and not slot.busy:
                self.void(shard, index)
        return self.begin(training, shard, version)

    def passed(self, shard: Shard, version: int) -> None:
        """Its rank has gone past this version without saving it. Others may wait for a word about theirs: were it not
        said, ranks in two groups could save every other version from then on, and none be sealed."""
        shard.pair.pass_over(Stamp(self._membership.epoch, version))
        self._sets.recount(shard.set)

    def void(self, shard: Shard, index: int) -> None:
        """It will not be completed."""
        shard.pair.void(index)
        self._sets.recount(shard.set)

    def read(self, shard: Shard, index: int, used: int) -> asyncio.Future[str]:
        """The digest of the leading `used` bytes of a slot that is being filled, read once, beside everything else:
        whoever fills it says that they do not change any more. Raises ValueError where it has said so of others.
        Who waits for it must shield it."""
        slot, reading = shard.pair.slots[index], shard.readings[index]
        if reading is not None and reading.slot is slot:
            if reading.used != used:
                raise ValueError(f"{used} bytes used, after {reading.used}")
            return reading.found
        if reading is not None:
            reading.found.cancel()
        found = asyncio.wrap_future(self._pool.read(shard.memory[index], used, urgency=Urgency.OWN))
        shard.readings[index] = Reading(slot, used, found)
        return found

    def landed(self, shard: Shard, index: int, claimed: Committed) -> None:
        """A process here says that all bytes are there: nobody writes any more. claimed: without a digest at the
        shard's home, else with that of its home. Raises ValueError as `read`."""
        found = self.read(shard, index, claimed.used_bytes)
        shard.pair.slots[index].busy = True
        self._spawn(self._verify(shard, index, claimed, found))

    async def _verify(self, shard: Shard, index: int, claimed: Committed, reading: asyncio.Future[str]) -> None:
        found = await asyncio.shield(reading)
        self.arrived(shard, index, claimed if claimed.digest else claimed._replace(digest=found), found)

    def arrived(self, shard: Shard, index: int, claimed: Committed, found: str) -> bool:
        """Complete a slot whose bytes are all there, if `found`, their digest, is the claimed one. Return whether it
        is; else the slot becomes void."""
        stamp, used, wanted = claimed
        slot = shard.pair.slots[index]
        if slot.state != "filling" or slot.stamp != stamp:
            return False
        if found == wanted:
            shard.pair.complete(index, stamp, found, used, shard.moment(index))
            shard.since[index] = shard.verified[index] = clock.time()
            shard.memory[index].commit(claimed)
            self._completed(shard, index)
        else:
            shard.pair.void(index)
            self._log(
                "damaged",
                version=stamp.version,
                detail=f"shard {shard.rank}: the copy's digest differs after the transfer",
            )
        self._sets.recount(shard.set)
        return found == wanted
