"""Identity of an agent."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gemini_hpc.config import Settings
from gemini_hpc.wire.handshake import Caller


@dataclass
class AgentIdentity:
    """An agent's identity, for its life.

    Attributes:
        uid: User id of the job's owner.
        directory: The job's directory on this node.
        again: Another agent of the job has died on this node.
        instance: Random id that distinguishes this agent from those.
        address, interface, port: The listening address, once the agent listens.
    """

    settings: Settings
    job: int
    uid: int
    node: str
    directory: str
    again: bool = False
    instance: str = field(default_factory=lambda: os.urandom(8).hex())
    address: str = ""
    interface: str = ""
    port: int = 0

    def build_caller(self, restart: int, lost: tuple[str, ...] = ()) -> Caller:
        """Return the agent as a caller of others, in an incarnation that continues without the lost nodes."""
        return Caller(self.settings.cluster_name, self.node, self.instance, max(restart, 0), lost)
