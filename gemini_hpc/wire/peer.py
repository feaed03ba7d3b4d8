"""Messages between agents; msgpack, one a frame (`wire.protocol`).

Every stamp is a pair (epoch, version). `round` numbers the recovery rounds of one incarnation; a message
of another round is dropped (R6; the incarnation itself is checked in the handshake).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.core import recovery_plan
from gemini_hpc.core.attempts import NOTHING, End
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.culprits import Cause
from gemini_hpc.core.domains import Separation
from gemini_hpc.core.moments import UNCOUNTED, UNKNOWN, Mark, Moment, Report
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
    SetName,
    StepName,
    TierInterval,
    Version,
)
from gemini_hpc.core.placement import Order
from gemini_hpc.core.sequence import Closed, Closing, Series
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.standstill import Host, Standing
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import NodeFile, Reason, Rejection, Tier

Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
MAX_SMALL_BYTES, MAX_DIRECTORY_BYTES = 1 << 20, 4 << 20

# ---- sign of life and suspicion ------------------------------------------------------------------------


class Ping(Message, frozen=True, tag="ping"):
    """Sent on every link each `heartbeat_s`."""


class ProbeAsk(Message, frozen=True, tag="probe?"):
    """Can you reach this host of our job? (indirect probing)"""

    host: str


class ProbeAnswer(Message, frozen=True, tag="probe"):
    """The answer; alive: a frame, or an answer to a fresh connection, came from it just now."""

    host: str
    alive: bool


class Liveness(Message, frozen=True, tag="liveness"):
    """Sent on to every link: the peers agree that this host is silent (alive=False), or that it is back."""

    host: str
    alive: bool
    restart: Restart


class Left(Message, frozen=True, tag="left"):
    """To every link, before it ends: the training has succeeded on this node and the job is over, so that this
    agent's silence is no death. A peer's epilog may run seconds later."""


class Launch(Message, frozen=True, tag="launch"):
    """Along the tree, both ways: what is known of the attempts of a step (`core.attempts.Known`). reason: for agents
    of an earlier version."""

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
    """Up the tree, to the root: what the end of this host's rank shows, in this attempt of a step. version: the
    newest that the attempt had begun to save, 0 before the first."""

    step: StepName
    attempt: Count
    host: Host
    rank: Count
    cause: Cause
    version: Version = 0


class Unhealthy(Message, frozen=True, tag="unhealthy"):
    """Up the tree, to the root: what the site's health check says of this host, where a rank has just failed."""

    host: Host
    rank: Count
    why: Reason


class FailedFirst(Message, frozen=True, tag="first"):
    """Down the tree: what the root has found of that attempt; all agents count, as each may be the next root."""

    step: StepName
    attempt: Count
    host: Host
    rank: Count
    cause: Cause
    version: Version = 0


# ---- recovery rounds, along the tree -------------------------------------------------------------------


class Collect(Message, frozen=True, tag="collect"):
    """Down: freeze, void what is half filled, report what you hold."""

    round: Round
    step: str


class InventoryRecord(msgspec.Struct, frozen=True):
    """What one agent holds. unreadable: versions on the tier (set and stamp) that turned out damaged; unbroken: it is
    no successor of one that died, so it would know what has been sealed; doubt: as in the plan that it took last;
    rejected: versions that ranks have found bad. order: of placement, in that map (`placement.Order`).
    closed: trainings that all ranks have closed; closing: those that ranks of this node have (`core.sequence`)."""

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


class InventoryUp(Message, frozen=True, tag="inventory"):
    """Up: the inventories of a whole subtree."""

    round: Round
    records: tuple[InventoryRecord, ...]


class Wake(Message, frozen=True, tag="wake"):
    """To an agent that waits detached: the job runs again, on these nodes (what its prolog would have said). lost:
    the agents go on without these."""

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


TIER = "tier:"  # among the sources of a copy: the persistent tier; no host has such a name


BEFORE = "before:"  # likewise: with a host behind it, the predecessor's agent there


class PullOrder(msgspec.Struct, frozen=True):
    """`dest` pulls this copy from the first of `sources` that can serve it; or makes it (its shard, or the parity
    `copy.of`) of parts, copies of its stripe at hosts that have them."""

    dest: str
    copy: Copy
    sources: tuple[str, ...]
    parts: tuple[tuple[str, Copy], ...] = ()


class SetPlan(msgspec.Struct, frozen=True):
    """What a set resumes from; chosen None: nothing, and `lost` says why.

    copies: the chosen copy of each rank with the hosts that hold it now. keep: what a holder does not void.
    sealed: what counts as sealed until the root's first word (core.recovery.SetPlan).
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
        """Whether what was chosen comes from the tier."""
        return any(TIER in sources for _, sources in self.copies)


class Heritage(msgspec.Struct, frozen=True):
    """What is taken over from another job of the same owner, its predecessor. ports: those of its agents, by host;
    stamps: what the chosen version of each set is called there (here: `recovery_plan.inherited`); lost: why it is not
    all, or nothing."""

    job: Job
    ports: dict[str, Port] = msgspec.field(default_factory=dict)
    stamps: dict[SetName, Stamp] = msgspec.field(default_factory=dict)
    lost: Reason = ""

    def origin(self, name: str, stamp: Stamp) -> Stamp | None:
        """What the predecessor calls this version of a set; None: it is none of it."""
        theirs = self.stamps.get(name)
        return theirs if theirs is not None and recovery_plan.inherited(theirs) == stamp else None


class PlanDown(Message, frozen=True, tag="plan"):
    """Down: the new map, epoch and versions. Void everything else, then acknowledge. unseen: why it is not known what
    the tier has; no launch is served by such a plan. tier: what the program has chosen, where the submission has
    not. doubt: the tier may have something newer, so whoever plans next has to look there. counted: by host, the
    instances whose inventories it was made of; an agent that was started since does not take it. rejected: versions
    that nobody is to choose any more. heritage: where the job takes over what another one has left. order: of
    placement (`placement.Order`); domains: what it could not keep apart, None where no failure domain is known.
    closed: trainings that all ranks have closed. looked: the tier has been looked at for all sets."""

    round: Round
    step: str
    epoch: Epoch
    noderanks: dict[str, Count]
    map_hash: str
    ports: dict[str, Port]
    sets: tuple[SetPlan, ...]
    pulls: tuple[PullOrder, ...]
    unseen: str = ""
    tier: Tier = Tier()
    doubt: bool = False
    counted: dict[str, str] = msgspec.field(default_factory=dict)
    rejected: tuple[Rejection, ...] = ()
    heritage: Heritage | None = None
    order: tuple[Count, ...] = ()
    domains: Separation | None = None
    closed: tuple[Closed, ...] = ()
    looked: bool = False

    def __post_init__(self) -> None:
        if self.order and len(Order(self.order).ranks) != len(self.noderanks):
            raise ValueError(f"an order of {len(self.order)} node ranks for {len(self.noderanks)} nodes")


class Taken(Message, frozen=True, tag="taken"):
    """To a predecessor's agent, on a connection of its successor's: what was to be taken over is sealed there."""


class PlanAck(Message, frozen=True, tag="ack"):
    """Up: my whole subtree has voided and has the map with this hash."""

    round: Round
    map_hash: str


class Go(Message, frozen=True, tag="go"):
    """Down: everyone has acknowledged; training may go on in the new epoch.

    Sent again with the launch (`step`) that the round serves, once there is one.
    """

    round: Round
    step: str


class RoundLost(Message, frozen=True, tag="lost"):
    """Up: the parent speaks of round `at`, which does not fit this agent's (it, or the parent, was restarted in
    between); the coordinator begins a new round above both."""

    at: Round
    mine: Round


class NeedRound(Message, frozen=True, tag="round?"):
    """Up: a launch of the training (`step`) has said hello here and wants to be served after `after_round`.

    again: a rank of that launch had been welcomed before, so that a round of its own is needed. tier: what the
    program has chosen.
    """

    after_round: Round
    step: str
    again: bool
    tier: Tier = Tier()


# ---- sealing, along the tree ---------------------------------------------------------------------------


class VoteUp(Message, frozen=True, tag="vote"):
    """Up: the merged vote of a subtree for one set (see core.seal).

    pairs: slot pairs that the subtree holds for the set; the root seals nothing before every shard of the
    training (`world`) is held on all of its holders. degraded: an agent of the subtree misses one of its peers.
    reports: the moments of the subtree's ranks at the version that the last decision calls void.
    """

    round: Round
    set: str
    pairs: Pairs
    world: Count
    degraded: bool
    kinds: int
    vote: msgspec.Raw
    reports: tuple[Report, ...] = ()


class DecisionDown(Message, frozen=True, tag="decision"):
    """Down: the root's word for one set. degraded: nothing can be sealed now, so nobody should wait for it. void,
    why: as in `core.votes.Decision`."""

    round: Round
    set: str
    sealed: Stamp | None
    abandoned: tuple[Stamp, ...]
    degraded: bool
    void: Stamp | None = None
    why: Annotated[str, msgspec.Meta(max_length=1000)] = ""


# ---- closed trainings, along the tree --------------------------------------------------------------------


class ClosedUp(Message, frozen=True, tag="closed"):
    """Up: so many ranks of the subtree, of `world`, have closed this training (`core.sequence.Closed`)."""

    round: Round
    set: SetName
    ranks: Count
    world: Count
    version: Version
    series: Series


class ClosedDown(Message, frozen=True, tag="closed-by-all"):
    """Down: all ranks have closed it. gone: and the job's next training has sealed a version, so nobody keeps it."""

    round: Round
    closed: Closed
    gone: bool = False


# ---- hangs, along the tree -----------------------------------------------------------------------------


class StandingUp(Message, frozen=True, tag="standing"):
    """Up, each second while it makes no progress, and once when it does again: how the ranks of a training stand in
    the whole subtree."""

    round: Round
    set: SetName
    standing: Standing


class HungDown(Message, frozen=True, tag="hung"):
    """Down, each second while it is so: this training hangs."""

    round: Round
    set: SetName
    standing: Standing


# ---- a node that the job is to leave, along the tree ----------------------------------------------------


class MoveUp(Message, frozen=True, tag="move"):
    """Up: the job is to leave a node at the next seal."""

    round: Round


class HoldDown(Message, frozen=True, tag="hold"):
    """Down, before the decision of the next seal: from that version on no rank makes another step."""

    round: Round


# ---- to the tier, along the tree -----------------------------------------------------------------------


class SaveDown(Message, frozen=True, tag="save"):
    """Down: this version, just sealed, goes to the tier: copy the shards whose home you are, at once. Said again with
    the same `attempt` it asks only what has become of it."""

    round: Round
    set: str
    stamp: Stamp
    attempt: Attempt = 0


class SaveUp(Message, frozen=True, tag="saved"):
    """Up: what node `host` has written of a version to the tier; file None: nothing, and why."""

    round: Round
    set: str
    stamp: Stamp
    host: str
    file: NodeFile | None
    reason: str = ""
    attempt: Attempt = 0


class SaveOver(Message, frozen=True, tag="save-over"):
    """Down: the job has ended, and its last versions are on the tier, or will not be: nobody need wait for it."""

    round: Round


class KeepWish(Message, frozen=True, tag="keep"):
    """Up: a rank wants this version on the tier for good, under this name, or the first one after it that can be had.
    Down: the root knows of it. Said again until it is done."""

    round: Round
    set: SetName
    name: SetName
    version: Version


class KeepDone(Message, frozen=True, tag="kept"):
    """Down: this wish is done: the version that has the name; stamp None: never, for another one has it."""

    round: Round
    set: SetName
    name: SetName
    version: Version
    stamp: Stamp | None = None


# ---- to the tier, when a node is missing: between the leader and all others --------------------------------------


class SalvageAsk(Message, frozen=True, tag="salvage?"):
    """From the leader: the job does not come back, what was sealed last where you are? Answered by `SalvageHave`."""


class Sealed(msgspec.Struct, frozen=True):
    """What an agent knows to have been sealed of a set, a training of `world` ranks."""

    set: SetName
    stamp: Stamp
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class Held(msgspec.Struct, frozen=True):
    """A complete copy."""

    set: SetName
    rank: Count
    home: Count
    stamp: Stamp


class SalvageHave(Message, frozen=True, tag="salvage"):
    """To the leader, an answer; with `calls`, to whoever should lead."""

    sealed: tuple[Sealed, ...]
    held: tuple[Held, ...]
    calls: bool = False


class SalvageWrite(Message, frozen=True, tag="salvage-write"):
    """From the leader: write your copies of this version's shards to the tier that are at home with these node ranks.
    Answered by `SalvageWrote`."""

    set: SetName
    stamp: Stamp
    homes: tuple[Count, ...]
    attempt: Attempt


class SalvageWrote(Message, frozen=True, tag="salvage-wrote"):
    """To the leader: the files that are on the tier now; reason: why not all are."""

    set: SetName
    stamp: Stamp
    files: tuple[NodeFile, ...]
    reason: str
    attempt: Attempt


class SalvageOver(Message, frozen=True, tag="salvage-over"):
    """From the leader: nothing more is wanted of you. saved: all that was sealed is on the tier; reason: why not, for
    who asked for it by hand."""

    saved: bool = False
    reason: str = ""


# ---- live replicas -----------------------------------------------------------------------------------------


class Outline(Message, frozen=True, tag="outline"):
    """Home of a shard -> nodes whose ranks have its tensors as well, and which are none of its holders: all of a
    version but the tensors. With it such a node can make a copy of its own, when the holders have died.

    slot_bytes: of the slot. areas: bytes of directory and tensors, and the most of the small state. key: digest of
    the directory, which comes when it is another than in the last outline.
    """

    round: Round
    set: SetName
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
    """The same to the same: that version is complete at the shard's home, with this digest."""

    round: Round
    set: SetName
    rank: Count
    stamp: Stamp
    digest: Digest


# ---- pulls, on connections of their own ----------------------------------------------------------------


class PullAsk(Message, frozen=True, tag="pull?"):
    """Send me this copy; answered by `PullHead`, then `used` raw bytes (covered by the digest). parity: that beside
    the rank's shard; end: only the bytes from `start` to there."""

    set: str
    rank: Count
    stamp: Stamp
    parity: bool = False
    start: Bytes = 0
    end: Bytes = 0


class PullHead(Message, frozen=True, tag="pull"):
    """Head of a copy; copy None: not here, with the reason. part: the digest of what comes, where not all does.
    later: it is on its way here."""

    copy: Copy | None
    reason: str = ""
    part: str = ""
    later: bool = False


# ---- pushes, on connections of their own ---------------------------------------------------------------


class PushAsk(Message, frozen=True, tag="push?"):
    """First on a connection: this shard, whose home I am, will come here version by version."""

    set: str
    rank: Count
    epoch: Epoch
    round: Round


class PushAnswer(Message, frozen=True, tag="push"):
    """To `PushAsk` and `PushHead`. reason "": yes; there: ranges of bytes that are here, and do not come.
    part: for parity: what does not come is not wanted, and what comes has a digest of its own."""

    reason: str = ""
    there: tuple[tuple[Bytes, Bytes], ...] = ()
    part: bool = False


class PushHead(Message, frozen=True, tag="version"):
    """A version comes: `used` bytes for a slot of `bytes` bytes. base: the version of this epoch since which the
    ranges `kept` are the same; the slot that is about to be filled may still have that one."""

    version: Version
    used: Bytes
    bytes: Bytes
    base: Version = 0
    kept: tuple[tuple[Bytes, Bytes], ...] = ()


class PushChunk(Message, frozen=True, tag="chunk"):
    """After this frame `length` raw bytes (covered by the digest) for this place in the slot, where the bytes before
    them, or what is there behind those, ended. Answered by `PushAck` when they are there."""

    offset: Bytes
    length: Bytes


class PushDone(Message, frozen=True, tag="done"):
    """The end of all `used` bytes, with their digest (`core.digest`, made by the home's agent). Its answer is a
    `PushAck`; the holder verifies it before it counts the copy (R5). part: the digest of a part, where only that was
    wanted. mark: of the shard's moment (`core.moments`)."""

    digest: str
    part: str = ""
    mark: Mark = UNKNOWN


class PushAck(Message, frozen=True, tag="acked"):
    """The slot has all bytes before this place."""

    end: Bytes
