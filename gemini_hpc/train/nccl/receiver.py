"""The background thread that receives another rank's versions into this node's slots.

Of a version whose tensors the device transfers, only the bytes before and behind the tensor area come over the link:
header, manifest and small state. The digest over the whole version follows. The agent verifies it over what the
device has written. A copy that was torn on any path is therefore never accepted.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content
from gemini_hpc.client.session import RankSession
from gemini_hpc.client.slot_requests import SlotRefused, SlotRequests
from gemini_hpc.train.device.memory import TensorShard, TensorShardOwner, TensorSlot, register
from gemini_hpc.train.nccl.driver import QUIET_S, Driver
from gemini_hpc.train.nccl.gloo_links import MessageInbox
from gemini_hpc.train.transport.base import Head, LinkBroken

_RETRY_S = 0.001  # the agent frees the slot with the next seal, within milliseconds


class Receiver(TensorShardOwner):
    """The receiver of training rank `rank`'s shard on this node."""

    def __init__(self, session: RankSession, inbox: MessageInbox, rank: int, driver: Driver) -> None:
        """Create a receiver; `start` starts its thread.

        Args:
            session: This rank's session with its agent.
            inbox: Link from the rank.
            rank: The training rank whose shard is received.
            driver: The driver of this rank's copies over NCCL.
        """
        super().__init__()
        self._session, self._slots, self._inbox, self.rank = session, SlotRequests(session, rank), inbox, rank
        self._driver = driver
        self.landed = 0
        self._thread = threading.Thread(target=self._run, name=f"gemini-receiver-{rank}", daemon=True)

    def start(self, shard: TensorShard | None) -> None:
        """Start to listen; without a shard every version is refused."""
        self.shard = shard
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the other end's goodbye for `timeout_s` seconds. Return whether the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        report = self._session.record_incident
        try:
            while (head := self._inbox.receive_head()) is not None:
                self._receive_version(head)
        except LinkBroken as error:
            report("degraded", 0, f"the link from rank {self.rank} broke: {error}")
        except Exception as error:  # our own failure must not reach the training
            report("degraded", 0, f"receiving from rank {self.rank} ended: {type(error).__name__}: {error}")

    def _receive_version(self, head: Head) -> None:
        desk = self._driver.desk
        try:
            if not head.used_bytes:
                self._prepare(head)
            elif head.apart[1]:
                self._complete(head)
            elif desk.wait_until_quiet(self.rank, QUIET_S):
                self._receive_over_link(head)
            else:
                self._report_skipped(head, "NCCL still uses its slots")
                self._inbox.answer(False)
        finally:
            desk.record_end(self.rank, head.version)

    def _report_skipped(self, head: Head, why: str) -> None:
        self._session.record_incident("skipped", head.version, f"shard of rank {self.rank}: {why}")

    def _prepare(self, head: Head) -> None:
        """Enlarge the slots from the next version on; no bytes follow this head."""
        if self.shard is not None and head.total_bytes != self.shard.total_bytes:
            try:
                self._enlarge(head.total_bytes)
            except (AgentLost, AgentRefused) as error:
                self._report_skipped(head, str(error))
        self._inbox.answer(False)

    def _enlarge(self, total_bytes: int) -> None:
        """Register larger slots.

        Raises:
            AgentLost: If the agent is gone.
            AgentRefused: If the agent refuses.
        """
        shard = register(self._session, self.rank, total_bytes)
        shard.populate()
        self.outgrow(shard)

    # ---- over the link ---------------------------------------------------------------------------------

    def _receive_over_link(self, head: Head) -> None:
        """Receive all bytes of a version over the link."""
        index = self._begin_version(head)
        self._inbox.answer(index is not None)
        if index is None:
            return
        assert self.shard is not None
        slot = self.shard.slots[index]
        slot.content = Content()
        try:
            self._inbox.receive(slot.bytes[: head.used_bytes])
            digest = self._inbox.receive_digest()
        except Exception:  # errors of the copy into the slot included
            self._slots.abort(head.version, index)
            raise
        self._report_landed(head, index, slot, digest)

    def _begin_version(self, head: Head) -> int | None:
        """Return the index of the slot to fill, or None.

        The seal of the version before may reach the sender's agent sooner than ours. The method waits for this seal,
        and for nothing else.
        """
        granted = self._driver.desk.claim_for_link(self.rank, head.version)
        if self.shard is None:
            return None
        if granted is not None and head.total_bytes == self.shard.total_bytes:
            return granted
        session, gate = self._session, self._session.gate
        deadline = clock.monotonic() + session.seal_timeout_s
        try:
            if head.total_bytes != self.shard.total_bytes:
                self._enlarge(head.total_bytes)
            while True:
                behind = bool(self.landed) and gate.sealed < (session.epoch, self.landed)
                try:
                    index = self._slots.begin(head.version)
                    self.release(gate.sealed)
                    return index
                except SlotRefused:
                    if not behind or gate.degraded or clock.monotonic() > deadline:
                        raise
                clock.sleep(_RETRY_S)
        except (AgentLost, AgentRefused) as error:
            self._report_skipped(head, str(error))
            return None

    # ---- over NCCL -------------------------------------------------------------------------------------

    def _complete(self, head: Head) -> None:
        """Receive everything but the tensors, which come over NCCL."""
        desk, offset, length = self._driver.desk, *head.apart
        fits = (offset, length) == self._driver.locate_area(self.rank) and self.shard is not None
        if fits and self.shard is not None and head.total_bytes != self.shard.total_bytes:
            fits = False
            with suppress(AgentLost, AgentRefused):  # there will be another version
                self._enlarge(head.total_bytes)
        grant = desk.commit(self.rank, head.version) if fits else None
        if grant is None:
            self._report_skipped(head, "no slot was free in time")
        self._inbox.answer(grant is not None)
        if grant is None:
            return
        self.release(self._session.gate.sealed)
        rest = torch.empty(head.sent_bytes, dtype=torch.uint8, device="cpu")
        self._inbox.receive(rest)
        digest = self._inbox.receive_digest()
        if not desk.wait_until_arrived(grant):
            self._slots.abort(head.version, grant.index)
            self._report_skipped(head, "it did not arrive over NCCL")
            self._move_on(head.version)
            return
        slot = grant.slot
        slot.bytes[:offset].copy_(rest[:offset])
        slot.bytes[offset + length : head.used_bytes].copy_(rest[offset:])
        self._report_landed(head, grant.index, slot, digest)

    def _report_landed(self, head: Head, index: int, slot: TensorSlot, digest: str) -> None:
        slot.content = Content(self._session.epoch, head.version, head.used_bytes, digest)
        try:
            self._slots.report_landed(head.version, index, head.used_bytes, digest)
        except (AgentLost, AgentRefused):
            self._move_on(head.version)
        else:
            self.landed = head.version

    def _move_on(self, version: int) -> None:
        with suppress(AgentLost, AgentRefused):  # an agent that is gone has forgotten the version
            self._driver.desk.move_on(self.rank, version)
