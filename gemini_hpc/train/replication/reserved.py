"""The memory of another rank's shard on this node, which the agents fill."""

from __future__ import annotations

from gemini_hpc.client.agent_connection import AgentClient
from gemini_hpc.client.seal_wait import SealGate
from gemini_hpc.train.device.memory import TensorShard, TensorShardOwner
from gemini_hpc.train.replication.registration import RankIdentity, register


class Reserved(TensorShardOwner):
    """The memory of `rank`'s shard, which this rank only keeps for the agent's successor."""

    def __init__(self, identity: RankIdentity, client: AgentClient, rank: int, home: int, gate: SealGate) -> None:
        super().__init__()
        self._me, self._client, self.rank, self._home, self._gate = identity, client, rank, home, gate
        self._grown = 0

    def catch_up(self) -> None:
        """Keep the larger slots too, if the agent has made any.

        The thread that saves calls this with every version.

        Raises:
            AgentLost: The agent is gone.
            AgentRefused: The agent refuses.
        """
        page = self._client.page
        if self.shard is None or page is None:
            return
        if (grown := page.grown) != self._grown:
            shard = register(self._client, self._me, self.rank, self._home, 0, pushed=True)
            if shard.total_bytes == self.shard.total_bytes:
                shard.close()
            else:
                self.outgrow(shard)
            self._grown = grown
        self.release(self._gate.sealed)

    @property
    def landed(self) -> int:
        """Return the newest version that has arrived; 0 for none."""
        shard = self.shard
        return max(slot.read_content().version for slot in shard.slots) if shard is not None else 0

    def start(self, shard: TensorShard | None) -> None:
        """Keep the slots of `shard`."""
        self.shard = shard

    def join(self, timeout_s: float) -> bool:
        """Return True: no thread has to end."""
        return True
