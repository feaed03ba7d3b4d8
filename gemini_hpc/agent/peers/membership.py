"""An agent's knowledge of its job's agents: its incarnation, and data that outlives incarnations."""

from __future__ import annotations

import msgspec

from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.core.placement import AS_RANKED, PlacementOrder
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message


class Membership:
    """The membership data of one agent.

    The class holds data only. The agent changes the incarnation, `recovery_member` applies a plan, and all parts
    read.

    Attributes:
        noderanks, placed, epoch: From the plan that this agent took last, in incarnation `map_restart`.
        doubt: The plan was made without a look at the tier.
        takeover: State taken over from the job's predecessor, if looked for since this agent started.
        detached: The job does not run here now.
        stop: The last stop of the trainings, until the next seal.
    """

    def __init__(self) -> None:
        self.incarnation: Incarnation | None = None
        self.noderanks: dict[str, int] = {}
        self.placed = AS_RANKED
        self.map_restart = -1
        self.epoch = 0
        self.doubt = False
        self.takeover: peer.Takeover | None = None
        self.detached = True
        self.stop = peer.Stop()

    @property
    def restart(self) -> int:
        """Return the number of the incarnation, -1 before the first."""
        return self.incarnation.restart if self.incarnation is not None else -1

    @property
    def lost(self) -> tuple[str, ...]:
        """Return the nodes of the incarnation that it goes on without."""
        return self.incarnation.attach.lost if self.incarnation is not None else ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the nodes of the incarnation."""
        return self.incarnation.hosts if self.incarnation is not None else ()

    @property
    def key(self) -> str:
        """Return the random key of the job's submission, or "" if it has none."""
        return self.incarnation.attach.key if self.incarnation is not None else ""

    @property
    def cluster(self) -> str:
        """Return Slurm's name of the cluster, or "" if unknown."""
        return self.incarnation.attach.cluster if self.incarnation is not None else ""

    @property
    def replicas(self) -> int:
        """Return the number of a shard's holders. With parity, return the number of nodes in a group."""
        wanted = self.incarnation.attach.replicas if self.incarnation is not None else 1
        return max(1, min(wanted, self.nodes))

    @property
    def redundancy(self) -> Redundancy:
        """Return how shards survive a loss of nodes."""
        attach = self.incarnation.attach if self.incarnation is not None else None
        parity = min(attach.parity, self.replicas - 1) if attach is not None and self.replicas > 1 else 0
        return Redundancy(self.nodes, self.replicas, parity, self.order)

    @property
    def nodes(self) -> int:
        """Return the number of node ranks: all nodes but the spares.

        Before the first plan of this incarnation the number is a guess.
        """
        incarnation = self.incarnation
        if incarnation is None:
            return 1
        if self.map_restart == incarnation.restart and self.noderanks:
            return len(self.noderanks)
        return min(len(incarnation.hosts), incarnation.view.wanted)

    @property
    def order(self) -> PlacementOrder:
        """Return the order of placement for this number of `nodes`."""
        return self.placed if len(self.placed.ranks) == self.nodes else AS_RANKED

    @property
    def round(self) -> int:
        """Return the number of the recovery round, 0 before the first."""
        return self.incarnation.rounds.round if self.incarnation is not None else 0

    @property
    def live(self) -> Incarnation | None:
        """Return the incarnation, or None during a recovery round."""
        return self.incarnation if self.incarnation is not None and self.incarnation.live else None

    @property
    def training(self) -> Incarnation | None:
        """Return the incarnation while ranks may train here, or None.

        Ranks may train if no recovery round is on and the job has not ended.
        """
        return None if self.detached else self.live

    def record_stop(self, now: float, lost: str = "") -> None:
        """Record a sign that the trainings have stopped.

        Args:
            now: Unix time. The first sign counts.
            lost: Node that was found dead.
        """
        nodes = tuple(sorted({*self.stop.lost, lost} - {""}))
        self.stop = msgspec.structs.replace(self.stop, time=self.stop.time or now, lost=nodes)

    def record_seal(self, name: str) -> None:
        """Forget the last stop: this training has sealed a version since."""
        if self.stop != peer.Stop():
            reached = {other: step for other, step in self.stop.reached.items() if other != name}
            self.stop = peer.Stop(reached=reached)

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the changes of nodes since the last stop, one sentence each."""
        return tuple(
            f"node {old} {'lost' if old in self.stop.lost else 'has left the job'}; {new} takes its place"
            for old, new in self.stop.replaced
        )

    def send(self, host: str, message: Message) -> bool:
        """Send to one peer. Return whether there is a link to it."""
        return self.incarnation is not None and self.incarnation.send(host, message)
