"""What a training rank here has of another rank's shard, because replicas of the state live on both nodes.

The rank fills these bytes of a version into the slot from its own tensors, so that they need not come over the
network. The digest that is made at the shard's home is over all of the slot: a copy that was filled here counts only
if it is, bit for bit, what the home has. All of this runs on the event loop.
"""

from __future__ import annotations

import asyncio

from gemini_hpc import clock
from gemini_hpc.agent.replicas.replica_fill import Fill
from gemini_hpc.agent.replicas.slot_writes import SlotWrites
from gemini_hpc.agent.replicas.store import Shard
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.core.ranges import Range
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.local_server import Client

WAIT_S = 1.0  # for a rank here that is later than the shard's home
_LATE = 4  # versions: one that has filled nothing for so long does not any more
_LOOK_S, _LATE_LOOK_S = 0.001, 0.1
_WRITES_S = 15.0  # a copy that was begun ends within that; longer than its process waits for it before it rejoins


def begin(filling: SlotWrites, client: Client, training: Training, shard: Shard, version: int, epoch: int) -> int:
    """Index of the slot that the rank may write to now, and no push. Raises `core.slots.Refused`."""
    before = list(shard.pair.slots)
    index = filling.begin(training, shard, version)
    shard.pair.slots[index].busy = True
    shard.fill = Fill(client, version, Stamp(epoch, version), index, before[index])
    return index


def end(client: Client, shard: Shard, version: int, there: tuple[Range, ...]) -> bool:
    """The rank has filled these bytes, and writes no more. False: it was not to."""
    fill = shard.fill
    if fill is None or fill.client is not client or fill.version != version or fill.over.is_set():
        return False
    fill.there = there
    _over(shard, fill)
    return True


def gone(client: Client, shards: list[Shard]) -> list[Shard]:
    """The connection of a process has ended. Returns the shards of which it may still be writing to a slot."""
    writing = []
    for shard in shards:
        if shard.fill is not None and shard.fill.client is client:
            if shard.fill.over.is_set():
                shard.fill = None
            else:
                writing.append(shard)
    return writing


async def ended(client: Client, shards: list[Shard]) -> None:
    """Return when it writes no more: it has ended, or so much time has passed that it has."""
    deadline = clock.monotonic() + _WRITES_S
    while client.lives() and clock.monotonic() < deadline and any(s.fill and s.fill.client is client for s in shards):
        await asyncio.sleep(_LATE_LOOK_S)
    for shard in shards:
        release(shard, client)


def release(shard: Shard, client: Client | None = None) -> None:
    """Nobody writes to it any more: its memory is registered anew, or `client` has ended."""
    fill = shard.fill
    if fill is not None and (client is None or fill.client is client):
        if not fill.over.is_set():
            _over(shard, fill)
        shard.fill = None


def _over(shard: Shard, fill: Fill) -> None:
    slot = shard.pair.slots[fill.index]
    if slot.state == "filling" and slot.stamp == fill.stamp:
        slot.busy = False
    fill.over.set()


async def awaited(shard: Shard, version: int) -> Fill | str | None:
    """What a rank here has filled of a version that is about to come, or why it cannot be taken. A rank that has
    filled the last versions is waited for, if not for long."""
    deadline = clock.monotonic() + WAIT_S
    while True:
        fill = shard.fill
        if fill is None or not version - _LATE <= fill.version <= version:
            return None
        if shard.unlike and fill.version < version:  # no rank here fills it any more
            return None
        if fill.version == version and fill.over.is_set():
            slot = shard.pair.slots[fill.index]
            return fill if slot.state == "filling" and slot.stamp == fill.stamp else None
        if clock.monotonic() > deadline:
            return f"a rank here is still filling version {version}" if fill.version == version else None
        await asyncio.sleep(_LOOK_S)
