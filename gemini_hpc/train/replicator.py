"""The background thread that brings each captured version into the own slot and to the other holders."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import xxhash

from gemini_hpc.core.chunks import cut
from gemini_hpc.core.manifest import Layout, pack_header
from gemini_hpc.core.slots import Stamp
from gemini_hpc.train.capture import Capture, Job
from gemini_hpc.train.client import AgentClient, AgentLost, AgentRefused
from gemini_hpc.train.seal import SealGate
from gemini_hpc.train.shared import Content, Keeper, Shard, Slot
from gemini_hpc.train.transport.base import Head, LinkBroken, Outbox
from gemini_hpc.wire import local

LEAST_SMALL_BYTES = 256 << 10


def small_capacity(first_bytes: int, kept_bytes: int = 0) -> int:
    """Room for small state that is `first_bytes` now. kept_bytes: the capacity that the saved run had: used again
    where it fits, so that the agent finds memory of the same size."""
    if kept_bytes >= LEAST_SMALL_BYTES and first_bytes * 5 // 4 <= kept_bytes:
        return kept_bytes
    wanted = max(LEAST_SMALL_BYTES, 2 * first_bytes)
    return 1 << (wanted - 1).bit_length()


@dataclass(frozen=True)
class Identity:
    """Who this rank is, for the agent."""

    set: str
    rank: int
    world: int
    node_rank: int
    epoch: int


@dataclass
class Counters:
    """What happened to the versions so far."""

    saved: int = 0
    skipped: int = 0
    void: int = 0
    copy_s: float = 0.0
    send_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


def register(client: AgentClient, me: Identity, rank: int, home: int, total_bytes: int) -> Shard:
    """Ask the agent for a shard's slots and map them. Raises AgentLost, AgentRefused."""
    reply, fds = client.request(
        local.Register(set=me.set, rank=rank, world=me.world, home=home, bytes=total_bytes), timeout_s=120.0
    )
    if not isinstance(reply, local.Slots) or reply.bytes != total_bytes:
        raise AgentRefused(f"the agent answered a registration of {total_bytes} bytes with {reply}")
    return Shard(rank, me.world, home, total_bytes, fds)


class Replicator(Keeper):
    """Takes jobs from the training, one at a time. `say(name, version, reason)` reports what the user should know;
    it is called from this thread. `broken` is told of a shard that can no longer be protected at all."""

    def __init__(
        self,
        me: Identity,
        client: AgentClient,
        capture: Capture,
        packed_manifest: bytes,
        layout: Layout,
        outboxes: dict[int, Outbox],
        gate: SealGate,
        *,
        chunk_bytes: int,
        max_repeated: int,
        say: Callable[[str, int, str], None],
        broken: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._me, self._client, self._capture, self._manifest = me, client, capture, packed_manifest
        self._layout, self._outboxes, self._gate = layout, outboxes, gate
        self._chunk_bytes, self._max_repeated = chunk_bytes, max_repeated
        self._say, self._broken = say, broken
        self.counters = Counters()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._current: Job | None = None
        self._last_saved = 0
        self._thread = threading.Thread(target=self._run, name="gemini-replicator", daemon=True)

    def start(self, shard: Shard) -> None:
        """The slots are there: begin to take jobs."""
        self.shard = shard
        self._thread.start()

    @property
    def busy(self) -> bool:
        """An earlier version is still on its way."""
        return self._current is not None and not self._current.done.is_set()

    def submit(self, job: Job) -> None:
        """Called by the training; at most one job waits behind the one in work."""
        self._current = job
        self._jobs.put(job)

    def stop(self, timeout_s: float) -> bool:
        """Finish what is there, say goodbye to the other holders; False if that took longer than timeout_s."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._save(job)
            except Exception as error:  # our own failure must not reach the training
                job.give_up()
                self._broken(f"{type(error).__name__}: {error}")
                return
            finally:
                job.left.set()
                job.done.set()
        for rank, box in self._outboxes.items():
            try:
                box.bye()
            except LinkBroken as error:
                self._drop(rank, error, 0)

    def _skip(self, job: Job, reason: str) -> None:
        job.give_up()
        self.counters.skipped += 1
        self.counters.reasons[reason] = self.counters.reasons.get(reason, 0) + 1
        self._say("skipped", job.version, reason)

    def _save(self, job: Job) -> None:
        if self._max_repeated > 1 and self._last_saved:
            self._gate.wait(self._last_saved, lambda: job.cancelled)
        try:
            slot_index, slot = self._begin(job)
        except (AgentLost, AgentRefused) as error:
            return self._skip(job, str(error))
        if slot is None:
            return None
        if not job.start():
            self._abort(job, slot_index)
            return self._skip(job, "the training did not wait for the slot")
        layout = self._layout
        began = time.monotonic()
        area = slot.bytes[layout.tensor_offset : layout.tensor_offset + max(layout.tensor_bytes, 1)]
        stamp = Stamp(self._me.epoch, job.version)
        self._capture.copy(job, slot_index, area)
        changed = self._capture.changed(job, slot_index, area)
        job.left.set()
        if changed:
            job.give_up()
            self._abort(job, slot_index)
            self.counters.void += 1
            self._say(
                "void",
                job.version,
                f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''}: changed "
                "after step() by something other than the optimizer; copied at step() from now on",
            )
            return None
        if not slot.has_manifest:
            slot.put(layout.manifest_offset, self._manifest)
            slot.has_manifest = True
        slot.put(layout.small_offset, job.small)
        slot.put(0, pack_header(layout, len(job.small), stamp, self._me.rank, self._me.world))
        used = layout.small_offset + len(job.small)
        self.counters.copy_s += time.monotonic() - began
        began = time.monotonic()
        digest = self._spread(job.version, slot, used)
        self.counters.send_s += time.monotonic() - began
        slot.content = Content(self._me.epoch, job.version, used, digest)
        try:
            self._client.request(
                local.Landed(
                    set=self._me.set,
                    rank=self._me.rank,
                    version=job.version,
                    slot=slot_index,
                    used=used,
                    digest=digest,
                )
            )
        except (AgentLost, AgentRefused) as error:
            return self._skip(job, str(error))
        self._last_saved = job.version
        self.counters.saved += 1
        return None

    def _begin(self, job: Job) -> tuple[int, Slot | None]:
        assert self.shard is not None
        if len(job.small) > self._layout.small_capacity:
            self._grow(len(job.small))
        reply, _ = self._client.request(local.Begin(set=self._me.set, rank=self._me.rank, version=job.version))
        if isinstance(reply, local.Refused):
            self._skip(job, reply.reason)
            return 0, None
        if not isinstance(reply, local.Begun) or not 0 <= reply.slot < 2:
            raise AgentRefused(f"the agent answered Begin with {reply}")
        self.release(self._gate.sealed)
        slot = self.shard.slots[reply.slot]
        slot.content = Content()
        return reply.slot, slot

    def _grow(self, small_bytes: int) -> None:
        """The small state has outgrown its place: larger slots."""
        assert self.shard is not None
        old = self._layout
        layout = Layout.plan(old.manifest_bytes, old.tensor_bytes, small_capacity(small_bytes))
        shard = register(self._client, self._me, self._me.rank, self._me.node_rank, layout.total)
        shard.populate()
        self.outgrow(shard)
        self._layout = layout

    def _abort(self, job: Job, slot_index: int) -> None:
        with suppress(AgentLost, AgentRefused):  # an agent that is gone, or has gone on, has voided it itself
            self._client.request(
                local.Abort(set=self._me.set, rank=self._me.rank, version=job.version, slot=slot_index)
            )

    def _drop(self, rank: int, error: Exception, version: int) -> None:
        if self._outboxes.pop(rank, None) is not None:
            self._say("degraded", version, f"the link to rank {rank} broke: {error}")
            if version:
                self._gate.degrade(f"nothing can be sealed without rank {rank}'s copies")

    def _spread(self, version: int, slot: Slot, used: int) -> str:
        """Digest of the slot's used bytes; on the way each chunk goes to every holder that accepts it."""
        accepting: dict[int, Outbox] = {}
        for rank, box in list(self._outboxes.items()):
            try:
                if box.offer(Head(version, used, self._layout.total)):
                    accepting[rank] = box
                else:
                    self._say("refused", version, f"rank {rank} could not take this version")
                    self._gate.degrade(f"version {version} cannot be sealed without rank {rank}'s copy")
            except LinkBroken as error:
                self._drop(rank, error, version)
        hasher = xxhash.xxh3_128()
        raw = slot.view()
        for offset, length in cut(used, self._chunk_bytes):
            chunk: torch.Tensor = slot.bytes[offset : offset + length]
            pending = []
            for rank, box in list(accepting.items()):
                try:
                    pending.append((rank, box.send(chunk)))
                except LinkBroken as error:
                    del accepting[rank]
                    self._drop(rank, error, version)
            hasher.update(raw[offset : offset + length])
            for rank, sent in pending:
                try:
                    sent.wait()
                except LinkBroken as error:
                    del accepting[rank]
                    self._drop(rank, error, version)
        digest = hasher.hexdigest()
        for rank, box in accepting.items():
            try:
                box.finish(digest)
            except LinkBroken as error:
                self._drop(rank, error, version)
        return digest
