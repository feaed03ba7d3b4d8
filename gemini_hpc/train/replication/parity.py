"""The parity beside this rank's shard: the agent keeps and fills it, the rank says of which shards it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemini_hpc.client.agent_connection import AgentClient, AgentRefused, Exchange
from gemini_hpc.core import parity
from gemini_hpc.train.replication.registration import Identity
from gemini_hpc.wire import local

_RESERVE_S = 120.0


class StripeParity:
    """others: the other ranks of the stripe; homes: the node rank of every rank."""

    def __init__(
        self,
        me: Identity,
        client: AgentClient,
        others: Sequence[int],
        homes: Sequence[int],
        blocks: int,
        step: Callable[[], int],
    ) -> None:
        """blocks: of it; step: completed ones of this rank."""
        self._me, self._client, self._blocks, self._step = me, client, blocks, step
        self._others = tuple((rank, homes[rank]) for rank in sorted(others))
        self._bytes = 0

    def reserve(self, totals: Sequence[int]) -> None:
        """Have the agent take the memory. totals: bytes of each rank's slot. Raises AgentLost, AgentRefused."""
        members = len(self._others) + 1
        rooms = (parity.block_bytes(totals[rank], members, self._blocks) for rank, _ in self._others)
        self._bytes = self._blocks * max(rooms)
        reply, _ = self._client.request(self._wish(), timeout_s=_RESERVE_S)
        if not isinstance(reply, local.Slots):
            raise AgentRefused(f"the agent answered a registration of parity with {reply}")

    def again(self, exchange: Exchange) -> None:
        """The agent is another one: what its predecessor had of it is gone, and others will not send it again, nor
        that of the step that they may be ahead. Were that not said, they would wait for it to be sealed."""
        if self._bytes:
            exchange(self._wish(passed=self._step() + 1))

    def _wish(self, passed: int = 0) -> local.Register:
        me = self._me
        return local.Register(
            set=me.set,
            rank=me.rank,
            world=me.world,
            home=me.node_rank,
            bytes=self._bytes,
            of=self._others,
            passed=passed,
        )
