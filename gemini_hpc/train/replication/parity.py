"""The parity beside this rank's shard. The agent keeps and fills it; the rank names the shards it covers."""

from __future__ import annotations

from collections.abc import Sequence

from gemini_hpc.client.agent_connection import AgentRefused, Exchange
from gemini_hpc.client.session import RankSession
from gemini_hpc.client.slot_requests import REGISTER_TIMEOUT_S
from gemini_hpc.core import parity
from gemini_hpc.wire import local


class StripeParity:
    """The parity memory that a rank has its agent keep, for the other shards of the stripe."""

    def __init__(self, session: RankSession) -> None:
        """Create the parity; `reserve` has the agent take the memory."""
        self._session, self._client, self._blocks = session, session.require_agent(), session.redundancy.parity
        self._others = tuple((rank, session.homes[rank]) for rank in sorted(session.targets[session.rank]))
        self._bytes = 0

    def reserve(self, totals: Sequence[int]) -> None:
        """Have the agent take the parity's memory.

        Args:
            totals: Size of each rank's slot in bytes.

        Raises:
            AgentLost: The agent is gone.
            AgentRefused: The agent refuses, or answers with another message.
        """
        members = len(self._others) + 1
        rooms = (parity.compute_block_bytes(totals[rank], members, self._blocks) for rank, _ in self._others)
        self._bytes = self._blocks * max(rooms)
        reply, _ = self._client.request(self._build_registration(), timeout_s=REGISTER_TIMEOUT_S)
        if not isinstance(reply, local.Slots):
            raise AgentRefused(f"the agent has no memory for parity: {local.describe_refusal(reply)}")

    def register_again(self, exchange: Exchange) -> None:
        """Register the parity with a new agent, which has nothing of its predecessor's parity.

        Other ranks will not send that parity again, nor the parity of the step that they may be ahead. Without the
        registration's `passed` they would wait for that step's version to be sealed.
        """
        if self._bytes:
            exchange(self._build_registration(passed=self._session.version + 1))

    def _build_registration(self, passed: int = 0) -> local.Register:
        session = self._session
        return local.Register(
            training=session.name,
            rank=session.rank,
            world=session.world,
            home=session.node_rank,
            bytes=self._bytes,
            members=self._others,
            passed=passed,
        )
