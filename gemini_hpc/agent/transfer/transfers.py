"""All ways by which bytes of slots come to this node, and leave it."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.agent.transfer.pull_scheduler import PullScheduler
from gemini_hpc.agent.transfer.push_receiver import PushReceiver
from gemini_hpc.agent.transfer.push_sender import PushSender


@dataclass(frozen=True)
class Transfers:
    """Of one agent."""

    incoming: PushReceiver
    outgoing: PushSender
    pulls: PullScheduler

    async def cease(self) -> None:
        """Nothing is written to, or read from, the slots by transfers when this returns."""
        self.incoming.stop()
        self.outgoing.stop()
        await self.pulls.cease()
        await self.incoming.ended()
        await self.outgoing.ended()
