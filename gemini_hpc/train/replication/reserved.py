"""The memory of another rank's shard on this node, which the agents fill."""

from __future__ import annotations

from gemini_hpc.client.session import RankSession
from gemini_hpc.train.device.memory import TensorShard, TensorShardOwner, register


class Reserved(TensorShardOwner):
    """The memory of `rank`'s shard, which this rank only keeps for the agent's successor."""

    def __init__(self, session: RankSession, rank: int) -> None:
        super().__init__()
        self._session, self._client, self.rank = session, session.require_agent(), rank
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
            shard = register(self._session, self.rank, 0, pushed=True)
            if shard.total_bytes == self.shard.total_bytes:
                shard.close()
            else:
                self.outgrow(shard)
            self._grown = grown
        self.release(self._session.gate.sealed)

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
