"""Requests of a rank to its agent about the slots of one shard."""

from __future__ import annotations

from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.session import RankSession
from gemini_hpc.wire import local

REGISTER_TIMEOUT_S = 120.0  # the agent reserves memory page by page: tens of gigabytes for each rank


class SlotRefused(AgentRefused):
    """A refusal of a slot for one version; the message is the agent's reason."""


class SlotRequests:
    """The requests about the shard of one training rank, which this node keeps."""

    def __init__(self, session: RankSession, rank: int) -> None:
        """Use the agent that the session has now.

        Args:
            session: This rank's session with its agent.
            rank: Training rank whose shard it is.

        Raises:
            AgentLost: Protection has ended.
        """
        self._client, self._training, self._rank = session.require_agent(), session.name, rank
        self._world, self._home = session.world, session.homes[rank]

    def register(self, total_bytes: int, *, pushed: bool = False) -> tuple[int, list[int]]:
        """Have the agent take the memory of both slots. Return the size of a slot, and the slots' descriptors.

        Args:
            total_bytes: Size of a slot. 0 with `pushed`: as large as the slots are now.
            pushed: The agent of the shard's home fills the slots.

        Raises:
            AgentLost: The agent is gone.
            AgentRefused: The agent refuses, or answers with other slots than those wanted.
        """
        message = local.Register(
            training=self._training,
            rank=self._rank,
            world=self._world,
            home=self._home,
            bytes=total_bytes,
            pushed=pushed,
        )
        reply, fds = self._client.request(message, timeout_s=REGISTER_TIMEOUT_S)
        if not isinstance(reply, local.Slots) or reply.bytes != (total_bytes or reply.bytes):
            what = f"the agent has no {total_bytes} bytes for the shard of rank {self._rank}"
            raise AgentRefused(f"{what}: {local.describe_refusal(reply)}")
        return reply.bytes, fds

    def begin(self, version: int) -> int:
        """Return the index of the slot for a version.

        Raises:
            AgentLost: The agent is gone.
            SlotRefused: The version gets no slot now.
            AgentRefused: The agent refuses for another reason.
        """
        reply, _ = self._client.request(local.BeginVersion(training=self._training, rank=self._rank, version=version))
        if isinstance(reply, local.Begun) and reply.slot in (0, 1):
            return reply.slot
        raise SlotRefused(reply.reason if isinstance(reply, local.Refused) else local.describe_refusal(reply))

    def abort(self, version: int, slot: int) -> bool:
        """Void a slot. Return False if the agent is gone or has gone on; it has then voided the slot itself."""
        try:
            self._client.request(local.Abort(training=self._training, rank=self._rank, version=version, slot=slot))
        except (AgentLost, AgentRefused):
            return False
        return True

    def report_landed(self, version: int, slot: int, used: int, digest: str = "") -> None:
        """Report that a slot has all of a version.

        Args:
            version: The version.
            slot: Index of the slot.
            used: Number of its bytes.
            digest: Digest made at the shard's home; "": the agent makes it.

        Raises:
            AgentLost: The agent is gone.
            AgentRefused: The agent does not take the version.
        """
        self._client.request(
            local.Landed(
                training=self._training, rank=self._rank, version=version, slot=slot, used=used, digest=digest
            )
        )
