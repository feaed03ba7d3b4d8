"""The objects that all parts of one agent share."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.agent.peers.event_log import EventLog, Log
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.tasks import Spawn
from gemini_hpc.config import Settings


@dataclass(frozen=True)
class AgentContext:
    """The context that all parts of one agent share.

    Attributes:
        identity: The agent's identity.
        membership: The agent's view of its job.
        events: The agent's log of the job's events.
        spawn: Starts a background task.
    """

    identity: AgentIdentity
    membership: Membership
    events: EventLog
    spawn: Spawn

    @property
    def node(self) -> str:
        """Return this node's name in Slurm."""
        return self.identity.node

    @property
    def settings(self) -> Settings:
        """Return the site's settings."""
        return self.identity.settings

    @property
    def log(self) -> Log:
        """Return the function that logs an event."""
        return self.events.log
