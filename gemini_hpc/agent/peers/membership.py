"""What an agent knows of its job's agents: the incarnation that it is in, and what outlives incarnations."""

from __future__ import annotations

from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.core.placement import AS_RANKED, Order
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message


class Membership:
    """Data alone; the agent changes the incarnation, `recovery_member` what a plan decides, and everybody reads.

    noderanks, placed, epoch: of the plan that this agent took last, in the incarnation map_restart; doubt: that plan
    was made without a look at the tier. heritage: what the job has taken over from its predecessor, if that was
    looked for since this agent was started. detached: the job does not run here now.
    """

    def __init__(self) -> None:
        self.incarnation: Incarnation | None = None
        self.noderanks: dict[str, int] = {}
        self.placed = AS_RANKED
        self.map_restart = -1
        self.epoch = 0
        self.doubt = False
        self.heritage: peer.Heritage | None = None
        self.detached = True

    @property
    def restart(self) -> int:
        """The number of the incarnation; -1 before the first."""
        return self.incarnation.restart if self.incarnation is not None else -1

    @property
    def lost(self) -> tuple[str, ...]:
        """Nodes of the incarnation that it goes on without."""
        return self.incarnation.attach.lost if self.incarnation is not None else ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes of the incarnation."""
        return self.incarnation.hosts if self.incarnation is not None else ()

    @property
    def key(self) -> str:
        """The random key of the job's submission; "": it has none."""
        return self.incarnation.attach.key if self.incarnation is not None else ""

    @property
    def cluster(self) -> str:
        """Slurm's name of the cluster; "" where it is not known."""
        return self.incarnation.attach.cluster if self.incarnation is not None else ""

    @property
    def replicas(self) -> int:
        """Holders of a shard; with parity the nodes of a group."""
        wanted = self.incarnation.attach.replicas if self.incarnation is not None else 1
        return max(1, min(wanted, self.nodes))

    @property
    def redundancy(self) -> Redundancy:
        """How shards survive a loss of nodes."""
        attach = self.incarnation.attach if self.incarnation is not None else None
        parity = min(attach.parity, self.replicas - 1) if attach is not None and self.replicas > 1 else 0
        return Redundancy(self.nodes, self.replicas, parity, self.order)

    @property
    def nodes(self) -> int:
        """Node ranks: all nodes but the spares. Before the first plan of this incarnation it is a guess."""
        incarnation = self.incarnation
        if incarnation is None:
            return 1
        if self.map_restart == incarnation.restart and self.noderanks:
            return len(self.noderanks)
        return min(len(incarnation.hosts), incarnation.view.wanted)

    @property
    def order(self) -> Order:
        """Of placement, for so many `nodes`."""
        return self.placed if len(self.placed.ranks) == self.nodes else AS_RANKED

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
