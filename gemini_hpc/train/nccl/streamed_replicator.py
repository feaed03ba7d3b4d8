"""The thread that saves versions whose tensors the device transfers.

Of such a version only the bytes before and behind the tensor area go over the link, and the digest over the whole
version, made from the own slot. See `receiver` for the other end.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.train.device.memory import TensorSlot
from gemini_hpc.train.nccl.driver import QUIET_S, Carried, Driver
from gemini_hpc.train.nccl.gloo_links import MessageOutbox, Sent
from gemini_hpc.train.replication.replicator import Replicator
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.state.capture import CaptureJob
from gemini_hpc.train.transport.base import Head, LinkBroken


class Outstanding:
    """The chunks in flight of one rank, at most p at a time.

    A separate thread waits for the acknowledgements. Their times are therefore right even while the sender waits for
    its turn.
    """

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._queue: queue.SimpleQueue[tuple[Sent, int, int, float] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._count = 0
        self._broken: LinkBroken | None = None
        self._backlog_bytes = 0
        self._thread = threading.Thread(target=self._run, name="gemini-acknowledged", daemon=True)
        self._thread.start()

    def add(self, pending: Sent, replica: int, size: int) -> None:
        """Record that a chunk of a replica has been sent."""
        now = clock.monotonic()
        with self._changed:
            self._count += 1
            self._backlog_bytes += size
            self._pacer.record_send(now)
        self._queue.put((pending, replica, size, now))

    def count_backlog(self) -> int:
        """Return the bytes in flight."""
        return self._backlog_bytes

    def wait_for_room(self, p: int) -> None:
        """Wait until fewer than p chunks are in flight.

        Raises:
            LinkBroken: If a chunk in flight is lost; raised once no chunk is in flight any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._count < p or self._broken is not None)
            broken = self._broken
        if broken is not None:
            self.drain()
            raise broken

    def drain(self) -> None:
        """Wait until no chunk is in flight, and clear the recorded error."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0)
            self._broken = None

    def stop(self) -> None:
        """End the thread after the chunks in flight; no more will be sent."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end for `timeout_s` seconds. Return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, replica, size, sent_at = item
            broken: LinkBroken | None = None
            try:
                pending.wait()
            except LinkBroken as error:
                broken = error
            except Exception as error:  # any error of a transport means that the chunk has not arrived
                broken = LinkBroken(f"{type(error).__name__}: {error}")
            with self._changed:
                self._count -= 1
                self._backlog_bytes -= size
                if broken is None:
                    self._pacer.record_ack(replica, size, sent_at)
                else:
                    self._pacer.meter.record_loss()
                self._broken = self._broken or broken
                self._changed.notify_all()


class StreamedReplicator(Replicator):
    """A replicator whose versions may be carried by the driver."""

    def __init__(self, *args: Any, driver: Driver, **more: Any) -> None:
        super().__init__(*args, **more)
        self._driver = driver
        self._outstanding = Outstanding(self._pacer)
        self._apart = False  # NCCL brings the present version's tensors to the holders

    def _save(self, job: CaptureJob) -> None:
        carried = self._driver.pop_carried(job.version)
        desk, own_rank = self._driver.desk, self._session.rank
        try:
            if carried is not None:
                self._finish(job, carried)
            elif job.streamed:
                self._skip(job, self._explain_lack(job))
            elif desk.wait_until_quiet(own_rank, QUIET_S):
                super()._save(job)
            else:
                self._skip(job, "the device has not finished an earlier copy into this rank's own slot")
        finally:
            desk.record_end(own_rank, job.version)

    def _explain_lack(self, job: CaptureJob) -> str:
        """Return the reason why this rank has nothing of a version that the others send over NCCL."""
        if len(job.small) > self._layout.small_capacity:
            try:
                self._enlarge_for_small(len(job.small))
            except (AgentLost, AgentRefused) as error:
                return str(error)
            self._driver.small_capacity = self._layout.small_capacity
            self._announce(job.version)
            return "the small state has outgrown its place: larger slots from the next version on"
        return "no slot was free in time"

    def _announce(self, version: int) -> None:
        """Announce the larger slots to the holders now, instead of with the head of the next version.

        Otherwise the device would write the tensors into slots that are no longer the right ones.
        """
        for rank, box in list(self._outboxes.items()):
            try:
                box.offer(Head(version, 0, self._layout.total, ()))
            except LinkBroken as error:
                self._drop_link(rank, error, version)

    def _begin_version(self, job: CaptureJob) -> tuple[int, TensorSlot]:
        granted = self._driver.desk.claim_for_link(self._session.rank, job.version)
        if granted is None or self.shard is None or len(job.small) > self._layout.small_capacity:
            begun = super()._begin_version(job)
            self._driver.small_capacity = self._layout.small_capacity
            return begun
        slot = self.shard.slots[granted]
        slot.content = Content()
        return granted, slot

    def _finish(self, job: CaptureJob, carried: Carried) -> None:
        """Complete a version on the host, once its tensors are in the own slot."""
        grant, layout = carried.grant, self._layout
        slot = grant.slot
        began = clock.monotonic()
        if not self._driver.wait_until_filled(carried):
            return self._skip(job, "the device has not filled this rank's own slot")
        if self.shard is None or slot not in self.shard.slots:  # larger slots were made during the transfer
            return self._skip(job, "larger slots have replaced this version's slot")
        area = slot.bytes[layout.tensor_offset : layout.tensor_offset + max(layout.tensor_bytes, 1)]
        self._pacer.copies.append((began, clock.monotonic(), layout.tensor_bytes))
        changed = carried.void + self._capture.find_torn(job, grant.index, area)
        if changed:
            return self._declare_void(job, grant.index, changed)
        self._put_directory(job, slot)
        self._apart = True
        try:
            return self._commit(job, grant.index, slot, began)
        finally:
            self._apart = False

    def _send_to_holders(self, version: int, slot: TensorSlot, used: int) -> str:
        if not self._apart or self._driver.problem:
            return self._send_all(version, slot, used)
        layout = self._layout
        sizes = tuple(n for n in (layout.tensor_offset, used - layout.tensor_offset - layout.tensor_bytes) if n)
        head = Head(version, used, layout.total, sizes, (layout.tensor_offset, layout.tensor_bytes))
        digest = digest_bytes(slot.view()[:used])
        self._refused, self._peer_lost = None, False
        for rank, box in list(self._outboxes.items()):
            assert isinstance(box, MessageOutbox)
            try:
                if not box.offer(head):
                    self._record_refusal(rank, version)
                    self._driver.record_refusal()
                    continue
                pending = [
                    box.send(part)
                    for part in (
                        slot.bytes[: layout.tensor_offset],
                        slot.bytes[layout.tensor_offset + layout.tensor_bytes : used],
                    )
                    if part.numel()
                ]
                for sent in pending:
                    sent.wait()
                box.finish(digest)
            except LinkBroken as error:
                self._drop_link(rank, error, version)
            self._pacer.record_progress()
        return digest

    def stop(self, timeout_s: float) -> bool:
        """Finish as `Replicator.stop` does, and end the thread that waits for acknowledgements."""
        deadline = clock.monotonic() + timeout_s
        if not super().stop(timeout_s):
            return False
        self._outstanding.stop()
        return self._outstanding.join(max(0.0, deadline - clock.monotonic()))

    def _build_head(self, replica: int, version: int, used: int) -> Head:
        return super()._build_head(replica, version, used)._replace(sizes=self._pacer.list_chunk_sizes(replica, used))

    def _send_all(self, version: int, slot: TensorSlot, used: int) -> str:
        """Send a version whose tensors do not go over NCCL, in chunks of announced sizes. Return its digest."""
        pacer, outstanding, accepting = self._pacer, self._outstanding, self._offer_to_holders(version, used)
        digest = digest_bytes(slot.view()[:used])
        for replica, rank, box in accepting:
            assert isinstance(box, MessageOutbox)
            at = 0
            try:
                for size in box.sizes:
                    outstanding.wait_for_room(pacer.p)
                    pacer.wait_for_turn(replica, at, size, outstanding.count_backlog)
                    outstanding.add(box.send(slot.bytes[at : at + size]), replica, size)
                    at += size
                self._count_sent(used)
                outstanding.wait_for_room(1)
                box.finish(digest)
            except LinkBroken as error:
                outstanding.drain()
                self._drop_link(rank, error, version)
            pacer.record_progress()
        return digest
