"""The background thread that receives another rank's versions into this node's slots."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content
from gemini_hpc.client.seal_wait import SealGate
from gemini_hpc.train.device.memory import TensorShard, TensorShardOwner, TensorSlot
from gemini_hpc.train.nccl.messages import MessageInbox
from gemini_hpc.train.replication.registration import RankIdentity, register
from gemini_hpc.train.transport.base import Head, LinkBroken
from gemini_hpc.wire import local

_RETRY_S = 0.001  # the agent frees the slot with the next seal, within milliseconds


class Receiver(TensorShardOwner):
    """The receiver of training rank `rank`'s shard on this node."""

    def __init__(
        self,
        identity: RankIdentity,
        client: AgentClient,
        inbox: MessageInbox,
        rank: int,
        home: int,
        gate: SealGate,
        *,
        seal_timeout_s: float,
        say: Callable[[str, int, str], None],
    ) -> None:
        """Create a receiver; `start` starts its thread.

        Args:
            identity: This rank's identity.
            client: Connection to the agent.
            inbox: Link from the rank.
            rank: The training rank whose shard is received.
            home: Node rank of the rank's home.
            gate: Waits for seals.
            seal_timeout_s: Longest wait for the seal of the version before, in seconds.
            say: Reports (event, version, text).
        """
        super().__init__()
        self._me, self._client, self._inbox, self.rank, self._home = identity, client, inbox, rank, home
        self._gate, self._patience_s, self._say = gate, seal_timeout_s, say
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
        try:
            while (head := self._inbox.receive_head()) is not None:
                self._receive_version(head)
        except LinkBroken as error:
            self._say("degraded", 0, f"the link from rank {self.rank} broke: {error}")
        except Exception as error:  # our own failure must not reach the training
            self._say("degraded", 0, f"receiving from rank {self.rank} ended: {type(error).__name__}: {error}")

    def _receive_version(self, head: Head) -> None:
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
            self._request(local.Abort(training=self._me.training, rank=self.rank, version=head.version, slot=index))
            raise
        self._report_landed(head, index, slot, digest)

    def _report_landed(self, head: Head, index: int, slot: TensorSlot, digest: str) -> None:
        slot.content = Content(self._me.epoch, head.version, head.used_bytes, digest)
        if self._request(
            local.Landed(
                training=self._me.training,
                rank=self.rank,
                version=head.version,
                slot=index,
                used=head.used_bytes,
                digest=digest,
            )
        ):
            self.landed = head.version

    def _enlarge(self, total_bytes: int) -> None:
        """Register larger slots.

        Raises:
            AgentLost: If the agent is gone.
            AgentRefused: If the agent refuses.
        """
        shard = register(self._client, self._me, self.rank, self._home, total_bytes)
        shard.populate()
        self.outgrow(shard)

    def _request(self, message: local.Message) -> bool:
        try:
            self._client.request(message)
        except (AgentLost, AgentRefused):
            return False
        return True

    def _begin_version(self, head: Head) -> int | None:
        """Return the index of the slot to fill, or None.

        The seal of the version before may reach the sender's agent sooner than ours. The method waits for this seal,
        and for nothing else.
        """
        if self.shard is None:
            return None
        deadline = clock.monotonic() + self._patience_s
        try:
            if head.total_bytes != self.shard.total_bytes:
                self._enlarge(head.total_bytes)
            while True:
                behind = bool(self.landed) and self._gate.sealed < (self._me.epoch, self.landed)
                reply, _ = self._client.request(
                    local.BeginVersion(training=self._me.training, rank=self.rank, version=head.version)
                )
                if isinstance(reply, local.Begun) and 0 <= reply.slot < 2:
                    self.release(self._gate.sealed)
                    return reply.slot
                if not behind or self._gate.degraded or clock.monotonic() > deadline:
                    reason = reply.reason if isinstance(reply, local.Refused) else str(reply)
                    self._say("skipped", head.version, f"shard of rank {self.rank}: {reason}")
                    return None
                clock.sleep(_RETRY_S)
        except (AgentLost, AgentRefused) as error:
            self._say("skipped", head.version, f"shard of rank {self.rank}: {error}")
            return None
