"""Messages between agents in msgpack, one a frame (`wire.protocol`).

Every stamp is a pair (epoch, version). `round` numbers the recovery rounds of one incarnation. An agent ignores a
message of another round (R6); the handshake checks the incarnation itself.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.core import recovery_plan
from gemini_hpc.core.attempts import NOTHING, End
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.culprits import Cause
from gemini_hpc.core.domains import Separation
from gemini_hpc.core.moments import UNCOUNTED, UNKNOWN, Mark, Moment, MomentReport
from gemini_hpc.core.numbers import (
    MAX_RANKS,
    Attempt,
    Blocks,
    Bytes,
    ClusterName,
    Count,
    Epoch,
    Job,
    JobKey,
    Pairs,
    Port,
    Restart,
    Round,
    Seconds,
    StepName,
    TierInterval,
    Time,
    TrainingName,
    Version,
)
from gemini_hpc.core.placement import PlacementOrder
from gemini_hpc.core.sequence import Closed, Closing, Series
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.standstill import HangStanding, Host
from gemini_hpc.core.votes import Vote
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import NodeFile, Reason, Rejection, Tier

PushName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
MAX_SMALL_BYTES, MAX_DIRECTORY_BYTES = 1 << 20, 4 << 20
MAX_AGAIN = 64  # pieces that come again; a copy with more bad ones is lost
MAX_STRIPES = 8  # connections of one shard to one holder

# ---- sign of life and suspicion ------------------------------------------------------------------------


class Ping(Message, frozen=True, tag="ping"):
    """A heartbeat, sent on every link each `heartbeat_s` seconds."""


class ProbeAsk(Message, frozen=True, tag="probe?"):
    """A question whether the receiver can reach this host of the job (indirect probing)."""

    host: str


class ProbeAnswer(Message, frozen=True, tag="probe"):
    """The answer to `ProbeAsk`.

    Attributes:
        alive: A frame, or an answer to a fresh connection, just arrived from the host.
    """

    host: str
    alive: bool


class Liveness(Message, frozen=True, tag="liveness"):
    """A report relayed on every link: the peers agree that this host is silent (alive=False), or is back."""

    host: str
    alive: bool
    restart: Restart


class AgentLeft(Message, frozen=True, tag="left"):
    """An announcement on every link before the agent ends, so that its silence does not count as death.

    The training has succeeded on this node and the job is over. A peer's epilog may run seconds later.
    """


class Launch(Message, frozen=True, tag="launch"):
    """Known facts about the attempts of a step (`core.attempts.Known`), sent both ways along the tree.

    Attributes:
        reason: Reason for agents of an earlier version.
    """

    step: StepName
    attempt: Count
    reason: Reason
    over: Reason
    done: bool
    first: End = NOTHING
    before: End = NOTHING
    last: End = NOTHING
    given_up: bool = False


class RankEnded(Message, frozen=True, tag="ended"):
    """Evidence of the end of this host's rank in this attempt of a step (up the tree to the root).

    Attributes:
        version: Newest version that the attempt had begun to save; 0: none yet.
    """

    step: StepName
    attempt: Count
    host: Host
    rank: Count
    cause: Cause
    version: Version = 0


class Unhealthy(Message, frozen=True, tag="unhealthy"):
    """A failed health check of this host after a rank's failure (up the tree to the root)."""

    host: Host
    rank: Count
    why: Reason


class FailedFirst(Message, frozen=True, tag="first"):
    """The root's finding about that attempt (down the tree).

    All agents record it, because each may be the next root.
    """

    step: StepName
    attempt: Count
    host: Host
    rank: Count
    cause: Cause
    version: Version = 0


# ---- recovery rounds, along the tree -------------------------------------------------------------------


class Collect(Message, frozen=True, tag="collect"):
    """A request down the tree to freeze, void half-filled slots, and report the inventory."""

    round: Round
    step: str


class Stop(msgspec.Struct, frozen=True):
    """The last stop of the job's trainings, remembered until the next seal so that the user's log can tell of it.

    Attributes:
        time: Time of its first sign (Unix time in seconds); 0: none.
        lost: Nodes found dead.
        replaced: Each node that has left the map, with the node in its place.
        reached: Newest completed step of each training.
    """

    time: Time = 0.0
    lost: tuple[Host, ...] = ()
    replaced: tuple[tuple[Host, Host], ...] = ()
    reached: dict[TrainingName, Version] = msgspec.field(default_factory=dict)


class InventoryRecord(msgspec.Struct, frozen=True):
    """An agent's inventory.

    Attributes:
        unreadable: Versions on the tier (training and stamp) that turned out damaged.
        unbroken: The agent does not succeed one that died, so it would know what has been sealed.
        doubt: Value of the plan that the agent accepted last.
        rejected: Versions that ranks found bad.
        order: Placement order in that map (`placement.Order`).
        closed: Trainings that all ranks have closed.
        closing: Trainings that ranks of this node have closed (`core.sequence`).
        stop: The last stop, as this agent knows it.
    """

    host: str
    noderanks: dict[str, Count] | None
    map_restart: int
    max_epoch: Epoch
    copies: tuple[Copy, ...]
    sealed: tuple[tuple[str, Stamp], ...]
    port: Port
    instance: str
    unreadable: tuple[tuple[str, Stamp], ...] = ()
    unbroken: bool = False
    doubt: bool = False
    rejected: tuple[Rejection, ...] = ()
    order: tuple[Count, ...] = ()
    closed: tuple[Closed, ...] = ()
    closing: tuple[Closing, ...] = ()
    stop: Stop = Stop()


class InventoryUp(Message, frozen=True, tag="inventory"):
    """The inventories of a whole subtree (up the tree)."""

    round: Round
    records: tuple[InventoryRecord, ...]


class Wake(Message, frozen=True, tag="wake"):
    """A message to a detached agent: the job runs again on these nodes.

    The content is what the agent's prolog would have sent.

    Attributes:
        lost: Nodes that the agents continue without.
    """

    restart: Restart
    nodelist: str
    replicas: Count
    tier: str = ""
    tier_interval: TierInterval = 0
    spares: Count = 0
    lost: tuple[str, ...] = ()
    hang: Seconds | None = None
    after: Job = 0
    parity: Blocks = 0
    key: JobKey = ""
    cluster: ClusterName = ""


TIER = "tier:"  # among a copy's sources: prefix of the persistent tier; no host has such a name


BEFORE = "before:"  # likewise, followed by a host: the predecessor job's agent there


class PullOrder(msgspec.Struct, frozen=True):
    """An order that `dest` pull a copy from the first of `sources` that can serve it.

    Otherwise `dest` rebuilds the copy (the shard, or the parity `copy.members`) from `parts`.

    Attributes:
        parts: Copies of the same stripe, each with the host that has it.
    """

    dest: str
    copy: Copy
    sources: tuple[str, ...]
    parts: tuple[tuple[str, Copy], ...] = ()


class PlannedTraining(msgspec.Struct, frozen=True):
    """The version that a training resumes from.

    Attributes:
        chosen: Stamp of that version; None: none, for the reasons in `lost`.
        copies: Chosen copy of each rank, with the hosts that hold it now.
        keep: Stamps that a holder does not void.
        sealed: Stamp that counts as sealed until the root's first decision (core.recovery_plan.TrainingPlan).
    """

    name: str
    chosen: Stamp | None
    keep: tuple[Stamp, ...]
    sealed: Stamp | None
    world: Count
    copies: tuple[tuple[Copy, tuple[str, ...]], ...]
    lost: tuple[str, ...]

    @property
    def stored(self) -> bool:
        """Return whether the chosen version comes from the tier."""
        return any(TIER in sources for _, sources in self.copies)


class Takeover(msgspec.Struct, frozen=True):
    """The versions taken over from another job of the same owner, the predecessor.

    Attributes:
        ports: Ports of the predecessor's agents, by host.
        stamps: The predecessor's stamp of each training's chosen version (here: `recovery_plan.inherit_stamp`).
        lost: Reason why not every version, or none, is taken over.
    """

    job: Job
    ports: dict[str, Port] = msgspec.field(default_factory=dict)
    stamps: dict[TrainingName, Stamp] = msgspec.field(default_factory=dict)
    lost: Reason = ""

    def find_origin(self, name: str, stamp: Stamp) -> Stamp | None:
        """Return the predecessor's stamp for this version of a training, or None if not taken over."""
        theirs = self.stamps.get(name)
        return theirs if theirs is not None and recovery_plan.inherit_stamp(theirs) == stamp else None


class PlanDown(Message, frozen=True, tag="plan"):
    """The plan of a recovery round: new map, epoch and versions (down the tree).

    An agent voids everything else, then acknowledges.

    Attributes:
        unseen: Reason why the content of the tier is unknown; no launch is served by such a plan.
        tier: The program's choice, if the submission made none.
        doubt: The tier may have a newer version, so the next planner must check it.
        counted: Agent instances whose inventories the plan uses, by host. An agent that started later refuses the
            plan.
        rejected: Versions that must never be chosen again.
        takeover: Versions that the job takes over from another job.
        order: Order of placement (`placement.Order`).
        domains: Failure domains that the order could not separate; None: none is known.
        closed: Trainings that all ranks have closed.
        looked: The tier has been checked for all trainings.
        stop: The last stop, as all agents know it together.
    """

    round: Round
    step: str
    epoch: Epoch
    noderanks: dict[str, Count]
    map_hash: str
    ports: dict[str, Port]
    trainings: tuple[PlannedTraining, ...]
    pulls: tuple[PullOrder, ...]
    unseen: str = ""
    tier: Tier = Tier()
    doubt: bool = False
    counted: dict[str, str] = msgspec.field(default_factory=dict)
    rejected: tuple[Rejection, ...] = ()
    takeover: Takeover | None = None
    order: tuple[Count, ...] = ()
    domains: Separation | None = None
    closed: tuple[Closed, ...] = ()
    looked: bool = False
    stop: Stop = Stop()

    def __post_init__(self) -> None:
        if self.order and len(PlacementOrder(self.order).ranks) != len(self.noderanks):
            raise ValueError(f"an order of {len(self.order)} node ranks for {len(self.noderanks)} nodes")


class TakenOver(Message, frozen=True, tag="taken-over"):
    """A message to a predecessor's agent, on its successor's connection.

    The versions taken over are now sealed at the successor.
    """


class PlanAck(Message, frozen=True, tag="ack"):
    """An acknowledgement up the tree: the whole subtree has voided and has the map with this hash."""

    round: Round
    map_hash: str


class Go(Message, frozen=True, tag="go"):
    """Permission down the tree: every agent has acknowledged, so training may continue in the new epoch.

    The coordinator sends it again with the launch (`step`) that the round serves, once there is one.
    """

    round: Round
    step: str


class RoundLost(Message, frozen=True, tag="lost"):
    """A report up the tree that the parent's round `parent_round` does not fit this agent's round `own_round`.

    The agent or the parent was restarted in between. The coordinator begins a new round above both.
    """

    parent_round: Round
    own_round: Round


class NeedRound(Message, frozen=True, tag="round?"):
    """A request up the tree for a round after `after_round`.

    A launch of the training (`step`) sent `Hello` here and needs to be served.

    Attributes:
        again: A rank of that launch was welcomed before, so the launch needs a round of its own.
        tier: The program's choice.
    """

    after_round: Round
    step: str
    again: bool
    tier: Tier = Tier()


# ---- sealing, along the tree ---------------------------------------------------------------------------


class VoteUp(Message, frozen=True, tag="vote"):
    """The merged vote of a subtree for one training (up the tree).

    Attributes:
        pairs: Number of the training's slot pairs in the subtree. The root seals nothing before every shard of the
            training (`world`) is held on all of its holders.
        degraded: An agent of the subtree misses one of its peers.
        kinds: The pairs are RESUMED or REGISTERED (`agent.replicas.voting`). Both bits mean pairs of different nodes,
            and prevent a seal.
        reports: Moments of the subtree's ranks at the version that the last decision calls void.
    """

    round: Round
    training: str
    pairs: Pairs
    world: Count
    degraded: bool
    kinds: int
    vote: Vote
    reports: tuple[MomentReport, ...] = ()


class DecisionDown(Message, frozen=True, tag="decision"):
    """The root's decision for one training (down the tree).

    Attributes:
        degraded: No version can be sealed now, so no rank should wait for a seal.
        void: Value of `core.votes.Decision`.
        why: Value of `core.votes.Decision`.
    """

    round: Round
    training: str
    sealed: Stamp | None
    abandoned: tuple[Stamp, ...]
    degraded: bool
    void: Stamp | None = None
    why: Annotated[str, msgspec.Meta(max_length=1000)] = ""


# ---- closed trainings, along the tree --------------------------------------------------------------------


class ClosedUp(Message, frozen=True, tag="closed"):
    """A count up the tree of the ranks that have closed this training.

    So many ranks of the subtree, of `world`, have closed it (`core.sequence.Closed`).
    """

    round: Round
    training: TrainingName
    ranks: Count
    world: Count
    version: Version
    series: Series


class ClosedDown(Message, frozen=True, tag="closed-by-all"):
    """A notice down the tree that all ranks have closed this training.

    Attributes:
        gone: The job's next training has also sealed a version, so no agent keeps this one's copies.
    """

    round: Round
    closed: Closed
    gone: bool = False


# ---- hangs, along the tree -----------------------------------------------------------------------------


class StandingUp(Message, frozen=True, tag="standing"):
    """The progress of a training's ranks in the whole subtree (up the tree).

    The agent sends it each second while the training makes no progress, and once when progress resumes.
    """

    round: Round
    training: TrainingName
    standing: HangStanding


class HungDown(Message, frozen=True, tag="hung"):
    """A notice that this training hangs, sent down the tree each second while it does."""

    round: Round
    training: TrainingName
    standing: HangStanding


# ---- a node that the job is to leave, along the tree ----------------------------------------------------


class MoveUp(Message, frozen=True, tag="move"):
    """A notice up the tree that the job is to leave a node at the next seal."""

    round: Round


class HoldDown(Message, frozen=True, tag="hold"):
    """An order down the tree, before the next seal's decision: no rank makes a step beyond that version."""

    round: Round


# ---- to the tier, along the tree -----------------------------------------------------------------------


class SaveDown(Message, frozen=True, tag="save"):
    """An order down the tree to save this version, just sealed, to the tier.

    Each agent copies the shards whose home it is at once. A repeated order with the same `attempt` only asks for the
    result.
    """

    round: Round
    training: str
    stamp: Stamp
    attempt: Attempt = 0


class SaveUp(Message, frozen=True, tag="saved"):
    """A report up the tree of node `host`'s file of a version; file None: none, with the reason."""

    round: Round
    training: str
    stamp: Stamp
    host: str
    file: NodeFile | None
    reason: str = ""
    attempt: Attempt = 0


class SaveOver(Message, frozen=True, tag="save-over"):
    """A notice down the tree after the job's end: its last versions are on the tier, or will not be.

    No agent need wait any longer.
    """

    round: Round


class KeepWish(Message, frozen=True, tag="keep"):
    """A rank's request to keep this version on the tier under this name for good.

    If the version is not available, the first later one gets the name. Up the tree the message carries the request;
    down the tree it confirms that the root knows of the request. The sender repeats it until the request is done.
    """

    round: Round
    training: TrainingName
    name: TrainingName
    version: Version


class KeepDone(Message, frozen=True, tag="kept"):
    """A notice down the tree that such a request is done.

    Attributes:
        stamp: Version that has the name; None: never, because another version has the name.
    """

    round: Round
    training: TrainingName
    name: TrainingName
    version: Version
    stamp: Stamp | None = None


# ---- to the tier, when a node is missing: between the leader and all others --------------------------------------


class SalvageAsk(Message, frozen=True, tag="salvage?"):
    """A leader's question for the newest sealed versions at an agent, because the job does not return.

    `SalvageHave` answers.
    """


class Sealed(msgspec.Struct, frozen=True):
    """An agent's knowledge of the sealed version of a training with `world` ranks."""

    training: TrainingName
    stamp: Stamp
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class Held(msgspec.Struct, frozen=True):
    """A complete copy."""

    training: TrainingName
    rank: Count
    home: Count
    stamp: Stamp


class SalvageHave(Message, frozen=True, tag="salvage"):
    """The answer to the leader. With `calls`, the message goes to the agent that should lead."""

    sealed: tuple[Sealed, ...]
    held: tuple[Held, ...]
    calls: bool = False


class SalvageWrite(Message, frozen=True, tag="salvage-write"):
    """A leader's order to write copies of a version to the tier.

    The agent writes its copies of the shards that have these homes (node ranks). `SalvageWrote` answers.
    """

    training: TrainingName
    stamp: Stamp
    homes: tuple[Count, ...]
    attempt: Attempt


class SalvageWrote(Message, frozen=True, tag="salvage-wrote"):
    """A report to the leader of the files that are on the tier now.

    Attributes:
        reason: Reason why not all files are there.
    """

    training: TrainingName
    stamp: Stamp
    files: tuple[NodeFile, ...]
    reason: str
    attempt: Attempt


class SalvageOver(Message, frozen=True, tag="salvage-over"):
    """A leader's notice that it wants nothing more from this agent.

    Attributes:
        saved: All sealed versions are on the tier.
        reason: Reason if not, for a user who requested the salvage by hand.
    """

    saved: bool = False
    reason: str = ""


# ---- live replicas -----------------------------------------------------------------------------------------


class Outline(Message, frozen=True, tag="outline"):
    """All of a version except its tensors, sent by a shard's home to nodes that could rebuild the copy.

    The ranks of those nodes have the shard's tensors as well, and the nodes hold no copy of it. With the outline such
    a node can make a copy of its own after the holders have died.

    Attributes:
        slot_bytes: Size of the slot.
        areas: Bytes of the directory, bytes of the tensors, and the maximum bytes of the small state.
        key: Digest of the directory. The directory itself is only sent if it differs from the last outline's.
    """

    round: Round
    training: TrainingName
    rank: Count
    world: Count
    home: Count
    slot_bytes: Bytes
    stamp: Stamp
    areas: tuple[Bytes, Bytes, Bytes]
    small: Annotated[bytes, msgspec.Meta(max_length=MAX_SMALL_BYTES)]
    key: Digest
    directory: Annotated[bytes, msgspec.Meta(max_length=MAX_DIRECTORY_BYTES)] = b""
    moment: Moment = UNCOUNTED


class OutlineDigest(Message, frozen=True, tag="outline-digest"):
    """A notice to the same nodes that the version is complete at the shard's home, with this digest."""

    round: Round
    training: TrainingName
    rank: Count
    stamp: Stamp
    digest: Digest


# ---- pulls, on connections of their own ----------------------------------------------------------------


class PullAsk(Message, frozen=True, tag="pull?"):
    """A request for bytes of a copy. A `PullHead` answers, then the bytes follow. Others of the same copy may follow.

    Attributes:
        parity: Send the parity beside the rank's shard instead.
        start: First byte.
        end: Byte after the last one.
        digests: Send the digests of their pieces, counted from `start`, with the head.
        bare: Send no bytes.
    """

    training: str
    rank: Count
    stamp: Stamp
    parity: bool
    start: Bytes
    end: Bytes
    digests: bool = False
    bare: bool = False


class PullHead(Message, frozen=True, tag="pull"):
    """The head of a copy.

    Attributes:
        copy: The copy; None: not here, with the reason.
        pieces: Digests of the pieces of the bytes asked for (`core.digest`), one after the other, if wanted.
        later: The copy is on its way here.
    """

    copy: Copy | None
    reason: str = ""
    pieces: bytes = b""
    later: bool = False


# ---- pushes, on connections of their own ---------------------------------------------------------------


class PushAsk(Message, frozen=True, tag="push?"):
    """The first message on a shard's leading push connection.

    The sender is this shard's home and will push the shard version by version.
    """

    training: str
    rank: Count
    epoch: Epoch
    round: Round


class PushStripe(Message, frozen=True, tag="stripe?"):
    """The first message on a further connection, which carries chunks of the same shard beside the leading one.

    It ends with the leading connection, and that one with it.

    Attributes:
        push: The leading connection, as its holder calls it.
        number: Number of this connection; the leading one has 0.
    """

    training: str
    rank: Count
    push: PushName
    number: Annotated[int, msgspec.Meta(ge=1, lt=MAX_STRIPES)]


class QueuePair(msgspec.Struct, frozen=True):
    """An end of an RDMA connection, as the other end needs it to connect (`agent.transfer.rdma`).

    Attributes:
        number: Number of the queue pair.
        psn: Number of its first packet.
        lid: Address of the port on InfiniBand.
        gid: Address of the port.
        mtu: Code of the largest packet.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    lid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    gid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]


class WriteWindow(msgspec.Struct, frozen=True):
    """The permission to write into memory of the sender of this message, from `address` on.

    The holder's device enforces it: its queue pair reaches nothing but that memory.
    """

    pair: QueuePair
    address: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    key: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class PushTrial(Message, frozen=True, tag="trial?"):
    """A request on a leading connection for memory of the size `rdma.TRIAL_BYTES`, to write into by RDMA.

    `PushAnswer` has the window, or the reason why there is none.
    """

    pair: QueuePair


class PushTried(Message, frozen=True, tag="tried"):
    """The end of a trial, with the digest of the bytes. `PushAnswer` has the reason if others arrived."""

    digest: Digest


class PushAnswer(Message, frozen=True, tag="push"):
    """The answer to `PushAsk`, `PushStripe`, `PushHead`, `PushTrial` and `PushTried`.

    Attributes:
        reason: Reason for a refusal; "": accepted.
        push: In answer to `PushAsk`: the holder's name for this connection.
        stripes: In answer to `PushAsk`: how many connections the holder takes, this one included.
        present: Byte ranges that the holder already has; the home does not send them.
        part: For parity: the bytes in `present` are not wanted, and those that come have a digest of their own.
        rdma: In answer to `PushAsk`: the holder has a device for RDMA, which may be tried.
        window: The bytes of this version, or of the trial, are to be written there, and none come on the connections.
    """

    reason: str = ""
    present: tuple[tuple[Bytes, Bytes], ...] = ()
    part: bool = False
    push: Annotated[str, msgspec.Meta(max_length=16)] = ""
    stripes: Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIPES)] = 1
    rdma: bool | msgspec.UnsetType = msgspec.UNSET  # unset fields do not travel
    window: WriteWindow | msgspec.UnsetType = msgspec.UNSET


class PushHead(Message, frozen=True, tag="version"):
    """The head of a version: `used` bytes for a slot of `bytes` bytes follow.

    Attributes:
        base: Version of this epoch that the slot to be filled may still have.
        kept: Byte ranges that have not changed since `base`.
        pair: The queue pair that would write the bytes, if the holder opens a window to it.
    """

    version: Version
    used: Bytes
    bytes: Bytes
    base: Version = 0
    kept: tuple[tuple[Bytes, Bytes], ...] = ()
    pair: QueuePair | msgspec.UnsetType = msgspec.UNSET


class PushChunk(Message, frozen=True, tag="chunk"):
    """The header of `length` raw bytes (covered by the digest) for this offset in the slot.

    Over the connections of a shard together, each byte that is not in `present` comes once, in any order.
    """

    offset: Bytes
    length: Bytes


class PushDone(Message, frozen=True, tag="done"):
    """The end of all `used` bytes, with their digest (`core.digest`, made by the home's agent).

    The holder verifies the digest before it counts the copy (R5). `PushVerified` answers, or `PushAgain`, after which
    these pieces come again, and then this message.

    Attributes:
        pieces: Digests of the pieces, of 16 bytes each; empty for parity, and where they are too long for a frame.
        part: Digest of a part, if only that part was wanted.
        mark: Mark of the shard's moment (`core.moments`).
    """

    digest: str
    part: str = ""
    mark: Mark = UNKNOWN
    pieces: bytes = b""


class PushAgain(Message, frozen=True, tag="again"):
    """The answer to `PushDone` where some pieces differ: their numbers in order. It comes once a version."""

    pieces: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1, max_length=MAX_AGAIN)
    ]


class PushAck(Message, frozen=True, tag="acked"):
    """A cumulative acknowledgement: this many bytes of the version have arrived on this connection.

    It is sent while bytes arrive, and at the latest before the holder waits for more.
    """

    arrived: Bytes


class PushVerified(Message, frozen=True, tag="verified"):
    """The answer to `PushDone`: the holder has done with the version."""
