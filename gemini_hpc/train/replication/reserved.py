"""The memory of another rank's shard on this node, which the agents fill."""

from __future__ import annotations

from gemini_hpc.client.agent_connection import AgentClient
from gemini_hpc.client.seal_wait import SealGate
from gemini_hpc.train.device.memory import Keeper, Shard
from gemini_hpc.train.replication.registration import Identity, register


class Reserved(Keeper):
    """The memory of `rank`'s shard. This rank keeps it for the agent's successor, and does nothing else."""

    def __init__(self, me: Identity, client: AgentClient, rank: int, home: int, gate: SealGate) -> None:
        super().__init__()
        self._me, self._client, self.rank, self._home, self._gate = me, client, rank, home, gate
        self._grown = 0

    def catch_up(self) -> None:
        """The agent may have made larger slots: keep these too. From the thread that saves, now and then. Raises
        AgentLost, AgentRefused."""
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
        """The newest version that has come; 0 for none."""
        shard = self.shard
        return max(slot.known().version for slot in shard.slots) if shard is not None else 0

    def start(self, shard: Shard | None) -> None:
        """The slots are there."""
        self.shard = shard

    def join(self, timeout_s: float) -> bool:
        """There is no thread to end."""
        return True
