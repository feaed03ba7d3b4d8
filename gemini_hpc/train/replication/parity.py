"""The parity beside this rank's shard. The agent keeps and fills it; the rank names the shards it covers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemini_hpc.client.agent_connection import AgentClient, AgentRefused, Exchange
from gemini_hpc.core import parity
from gemini_hpc.train.replication.registration import RankIdentity
from gemini_hpc.wire import local

_RESERVE_S = 120.0  # the agent reserves memory page by page


class StripeParity:
    """The parity memory that a rank has its agent keep, for the other shards of the stripe."""

    def __init__(
        self,
        identity: RankIdentity,
        client: AgentClient,
        others: Sequence[int],
        homes: Sequence[int],
        blocks: int,
        step: Callable[[], int],
    ) -> None:
        """Create the parity; `reserve` has the agent take the memory.

        Args:
            identity: This rank.
            client: The connection to the agent.
            others: The other ranks of the stripe.
            homes: Node rank of every rank.
            blocks: Number of parity blocks in each row of the stripe.
            step: Returns the number of steps that this rank has completed.
        """
        self._me, self._client, self._blocks, self._step = identity, client, blocks, step
        self._others = tuple((rank, homes[rank]) for rank in sorted(others))
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
        reply, _ = self._client.request(self._build_registration(), timeout_s=_RESERVE_S)
        if not isinstance(reply, local.Slots):
            raise AgentRefused(f"the agent answered a registration of parity with {reply}")

    def register_anew(self, exchange: Exchange) -> None:
        """Register the parity with a new agent, which has nothing of its predecessor's parity.

        Other ranks will not send that parity again, nor the parity of the step that they may be ahead. Without the
        registration's `passed` they would wait for that step's version to be sealed.
        """
        if self._bytes:
            exchange(self._build_registration(passed=self._step() + 1))

    def _build_registration(self, passed: int = 0) -> local.Register:
        identity = self._me
        return local.Register(
            training=identity.training,
            rank=identity.rank,
            world=identity.world,
            home=identity.node_rank,
            bytes=self._bytes,
            of=self._others,
            passed=passed,
        )
