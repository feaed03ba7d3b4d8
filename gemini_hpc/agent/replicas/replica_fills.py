"""Fills: bytes of another rank's shard that a training rank here writes, because both nodes replicate the state.

The rank writes these bytes of a version into the slot from its own tensors. They then need not come over the network.
The digest from the shard's home covers the whole slot. A copy filled here therefore counts only if it equals the
home's copy bit for bit. All functions run on the event loop.

A copy that differs after a fill is void. Its holder passes the version over, so that the root abandons it at once.
The shard takes no more fills until it is registered anew.
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
from gemini_hpc.wire.local_server import LocalClient

WAIT_S = 1.0  # wait for a rank here that lags behind the shard's home
_LATE = 4  # versions: a rank that has filled none of the last ones does not fill any more
_LOOK_S, _LATE_LOOK_S = 0.001, 0.1  # poll intervals for a fill, and for the end of its process
_WRITES_S = 15.0  # a begun write ends within this time; longer than the process waits for it before it rejoins


def begin_fill(
    filling: SlotWrites, client: LocalClient, training: Training, shard: Shard, version: int, epoch: int
) -> int:
    """Return the index of the slot that the rank, and no push, may write to now.

    Raises:
        core.slots.Refused: No slot may be written to now.
    """
    before = list(shard.pair.slots)
    index = filling.begin_write(training, shard, version)
    shard.pair.slots[index].busy = True
    shard.fill = Fill(client, version, Stamp(epoch, version), index, before[index])
    return index


def end(client: LocalClient, shard: Shard, version: int, present: tuple[Range, ...]) -> bool:
    """Record that the rank has filled these bytes and writes no more. Return False if it had no permission."""
    fill = shard.fill
    if fill is None or fill.client is not client or fill.version != version or fill.over.is_set():
        return False
    fill.present = present
    _end_fill(shard, fill)
    return True


def on_disconnect(client: LocalClient, shards: list[Shard]) -> list[Shard]:
    """Handle the end of a process's connection. Return the shards whose slots the process may still be writing to.

    What the process has filled stays: the shard's home may send the rest of that version only now.
    """
    writing = []
    for shard in shards:
        if shard.fill is not None and shard.fill.client is client:
            shard.fill.is_last = True
            if not shard.fill.over.is_set():
                writing.append(shard)
    return writing


async def wait_for_end(client: LocalClient, shards: list[Shard]) -> None:
    """Wait until the process writes no more: it has ended, or the time for any write has passed."""
    deadline = clock.monotonic() + _WRITES_S
    fills = [(shard, shard.fill) for shard in shards if shard.fill is not None and shard.fill.client is client]
    while client.is_alive() and clock.monotonic() < deadline and not all(fill.over.is_set() for _, fill in fills):
        await asyncio.sleep(_LATE_LOOK_S)
    for shard, fill in fills:
        _end_fill(shard, fill)


def release(shard: Shard) -> None:
    """Forget the fill, because its memory is registered anew."""
    shard.unfilled = 0
    if shard.fill is not None:
        _end_fill(shard, shard.fill)
        shard.fill = None


def _end_fill(shard: Shard, fill: Fill) -> None:
    slot = shard.pair.slots[fill.index]
    if not fill.over.is_set() and slot.state == "filling" and slot.stamp == fill.stamp:
        slot.busy = False
    fill.over.set()


async def wait_for_fill(shard: Shard, version: int) -> Fill | str | None:
    """Return what a rank here has filled of a version that is about to arrive, or why the version cannot be taken.

    A rank that has filled the last versions is waited for, for up to `WAIT_S` seconds. Return None without a fill.
    """
    deadline = clock.monotonic() + WAIT_S
    while True:
        fill = shard.fill
        if fill is None or not version - _LATE <= fill.version <= version:
            return None
        is_left_out = shard.unlike or fill.is_last or shard.unfilled >= version
        if is_left_out and fill.version < version:  # no rank here fills it
            return None
        if fill.version == version and fill.over.is_set():
            slot = shard.pair.slots[fill.index]
            return fill if slot.state == "filling" and slot.stamp == fill.stamp else None
        if clock.monotonic() > deadline:
            return f"a rank here is still filling version {version}" if fill.version == version else None
        await asyncio.sleep(_LOOK_S)
