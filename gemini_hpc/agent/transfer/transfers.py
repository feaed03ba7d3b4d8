"""All transfers of slots' bytes to and from this node."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.agent.transfer.pull_scheduler import PullScheduler
from gemini_hpc.agent.transfer.push_receiver import PushReceiver
from gemini_hpc.agent.transfer.push_sender import PushSender


@dataclass(frozen=True)
class Transfers:
    """The transfers of one agent."""

    incoming: PushReceiver
    outgoing: PushSender
    pulls: PullScheduler

    async def cease(self) -> None:
        """Stop all transfers. On return none of them reads from or writes to a slot."""
        self.incoming.stop()
        self.outgoing.stop()
        await self.pulls.cease()
        await self.incoming.wait_stopped()
        await self.outgoing.wait_stopped()
