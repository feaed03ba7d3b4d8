"""What an agent knows of its job's agents: the incarnation that it is in, and what outlives incarnations."""

from __future__ import annotations

from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.wire.message import Message


class Membership:
    """Data alone; the agent changes the incarnation, `recovery_member` what a plan decides, and everybody reads.

    noderanks, epoch: of the plan that this agent took last, in the incarnation map_restart; doubt: that plan was made
    without a look at the tier. detached: the job does not run here now.
    """

    def __init__(self) -> None:
        self.incarnation: Incarnation | None = None
        self.noderanks: dict[str, int] = {}
        self.map_restart = -1
        self.epoch = 0
        self.doubt = False
        self.detached = True

    @property
    def restart(self) -> int:
        """The number of the incarnation; -1 before the first."""
        return self.incarnation.restart if self.incarnation is not None else -1

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes of the incarnation."""
        return self.incarnation.hosts if self.incarnation is not None else ()

    @property
    def replicas(self) -> int:
        """Holders of a shard."""
        return self.incarnation.replicas if self.incarnation is not None else 1

    @property
    def round(self) -> int:
        """The recovery round; 0 before the first."""
        return self.incarnation.rounds.round if self.incarnation is not None else 0

    @property
    def live(self) -> Incarnation | None:
        """The incarnation, while no recovery round is on."""
        return self.incarnation if self.incarnation is not None and self.incarnation.live else None

    @property
    def training(self) -> Incarnation | None:
        """The incarnation, while ranks may train here: no recovery round is on, and the job has not ended."""
        return None if self.detached else self.live

    def send(self, host: str, message: Message) -> bool:
        """To one peer, if there is a link."""
        return self.incarnation is not None and self.incarnation.send(host, message)
