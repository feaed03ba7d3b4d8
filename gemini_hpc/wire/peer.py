"""Messages between agents, and between agents and the controller; msgpack, one a frame.

Every stamp is a pair (epoch, version). `round` numbers the recovery rounds of one incarnation; a message
of another round is dropped (R6; the incarnation itself is checked in the handshake).
"""

from __future__ import annotations

import msgspec

from gemini_hpc.wire.bounds import (
    Bytes,
    Count,
    Epoch,
    Job,
    Pairs,
    Port,
    Restart,
    Round,
    Seconds,
    Stamp,
    Strict,
    Time,
    Version,
)

StampT = Stamp


class Message(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all messages between machines; the key `kind` names the type."""


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


class Obituary(Message, frozen=True, tag="obituary"):
    """Sent on to every link: the peers agree that this host is silent (alive=False), or that it is back."""

    host: str
    alive: bool
    restart: Restart


# ---- recovery rounds, along the tree -------------------------------------------------------------------


class Collect(Message, frozen=True, tag="collect"):
    """Down: freeze, void what is half filled, report what you hold."""

    round: Round
    step: str


class CopyRecord(msgspec.Struct, frozen=True):
    """One complete, verified copy."""

    set: str
    rank: Count
    world: Count
    home: Count
    bytes: Bytes
    used: Bytes
    stamp: StampT
    digest: str


class InventoryRecord(msgspec.Struct, frozen=True):
    """What one agent holds."""

    host: str
    noderanks: dict[str, Count] | None
    map_restart: int
    max_epoch: Epoch
    copies: tuple[CopyRecord, ...]
    sealed: tuple[tuple[str, StampT], ...]
    port: Port
    instance: str


class InventoryUp(Message, frozen=True, tag="inventory"):
    """Up: the inventories of a whole subtree."""

    round: Round
    records: tuple[InventoryRecord, ...]


class Summons(Message, frozen=True, tag="summons"):
    """To an agent that waits detached: the job runs again, on these nodes (what its prolog would have said)."""

    restart: Restart
    nodelist: str
    replicas: Count
    tier: str = ""
    tier_interval: Seconds = 0


class PullOrder(msgspec.Struct, frozen=True):
    """`dest` pulls this copy from the first of `sources` that can serve it."""

    dest: str
    copy: CopyRecord
    sources: tuple[str, ...]


class SetPlan(msgspec.Struct, frozen=True):
    """What a set resumes from; chosen None: nothing, and `lost` says why.

    copies: the chosen copy of each rank with the hosts that hold it now. keep: what a holder does not void.
    sealed: what counts as sealed until the root's first word (core.recovery.SetPlan).
    """

    name: str
    chosen: StampT | None
    keep: tuple[StampT, ...]
    sealed: StampT | None
    world: Count
    copies: tuple[tuple[CopyRecord, tuple[str, ...]], ...]
    lost: tuple[str, ...]


class PlanDown(Message, frozen=True, tag="plan"):
    """Down: the new map, epoch and versions. Void everything else, then acknowledge."""

    round: Round
    step: str
    epoch: Epoch
    noderanks: dict[str, Count]
    map_hash: str
    ports: dict[str, Port]
    sets: tuple[SetPlan, ...]
    pulls: tuple[PullOrder, ...]


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

    again: a rank of that launch had been welcomed before, so that a round of its own is needed.
    """

    after_round: Round
    step: str
    again: bool


# ---- sealing, along the tree ---------------------------------------------------------------------------


class VoteUp(Message, frozen=True, tag="vote"):
    """Up: the merged vote of a subtree for one set (see core.seal).

    pairs: slot pairs that the subtree holds for the set; the root seals nothing before every shard of the
    training (`world`) is held on all of its holders. degraded: an agent of the subtree misses one of its peers.
    """

    round: Round
    set: str
    pairs: Pairs
    world: Count
    degraded: bool
    kinds: int
    vote: msgspec.Raw


class WordDown(Message, frozen=True, tag="word"):
    """Down: the root's word for one set. degraded: nothing can be sealed now, so nobody should wait for it."""

    round: Round
    set: str
    sealed: StampT | None
    abandoned: tuple[StampT, ...]
    degraded: bool


# ---- pulls, on connections of their own ----------------------------------------------------------------


class PullAsk(Message, frozen=True, tag="pull?"):
    """Send me this copy; answered by `PullHead`, then `used` raw bytes (covered by the digest)."""

    set: str
    rank: Count
    stamp: StampT


class PullHead(Message, frozen=True, tag="pull"):
    """Head of a copy; copy None: not here, with the reason."""

    copy: CopyRecord | None
    reason: str = ""


# ---- events and questions ------------------------------------------------------------------------------


class EventRecord(msgspec.Struct, frozen=True):
    """One line of a job's event log. t: Unix time in seconds."""

    t: Time
    name: str
    host: str
    restart: Restart
    version: Version = 0
    detail: str = ""


class InspectAsk(Message, frozen=True, tag="inspect?"):
    """Tell what you hold."""

    request: int = 0


class HeldSlot(msgspec.Struct, frozen=True):
    """One slot as its holder sees it. state: empty, filling, complete; verified: Unix time of the last check."""

    set: str
    rank: Count
    world: Count
    home: Count
    slot: int
    state: str
    stamp: StampT | None
    bytes: Bytes
    used: Bytes
    since: Time
    verified: Time


class SetState(msgspec.Struct, frozen=True):
    """One set on one node. state: arming, protected, degraded, recovering, finished."""

    name: str
    world: Count
    sealed: StampT | None
    state: str
    ranks: tuple[int, ...]
    note: str = ""


class InspectPart(Message, frozen=True, tag="inspect"):
    """One agent's part of the picture."""

    host: str
    job: Job
    uid: int
    restart: Restart
    replicas: Count
    epoch: Epoch
    round: Round
    state: str
    hosts: tuple[str, ...]
    noderanks: dict[str, Count]
    address: str
    interface: str
    port: Port
    memory_bytes: Bytes
    memory_cap_bytes: Bytes
    sets: tuple[SetState, ...]
    held: tuple[HeldSlot, ...]
    events: tuple[EventRecord, ...]
    suspects: tuple[str, ...]
    dead: tuple[str, ...]
    request: int = 0


# ---- agent and controller ------------------------------------------------------------------------------


class Registration(Message, frozen=True, tag="register"):
    """Agent -> controller, first message after the handshake and again after each attach (a hint: SITE 1)."""

    job: Job
    restart: Restart
    host: str
    hosts: tuple[str, ...]
    replicas: Count
    port: Port
    instance: str
    state: str


class Report(Message, frozen=True, tag="report"):
    """Agent -> controller: this host of my job is silent; witnesses: peers that could not reach it either."""

    job: Job
    restart: Restart
    host: str
    witnesses: tuple[str, ...]
    t: Time


class EventsUp(Message, frozen=True, tag="events"):
    """Agent -> controller: new lines of the event log."""

    job: Job
    events: tuple[EventRecord, ...]


class Release(Message, frozen=True, tag="release"):
    """Controller -> agent: the job has ended for good (reason), free everything and exit."""

    job: Job
    reason: str


class Notice(Message, frozen=True, tag="notice"):
    """Controller -> agent: one line for the users of the job, which its first training rank prints (SITE 13)."""

    job: Job
    text: str


class HoldersAsk(Message, frozen=True, tag="holders?"):
    """Agent -> controller: which other agents of my job are there, on nodes that the job has left?"""

    job: Job


class Holders(Message, frozen=True, tag="holders"):
    """Controller -> agent: hosts on which agents of the job are or have been; their ports, 0 where that is not known
    (hints, like all of this)."""

    job: Job
    ports: dict[str, Port]


class JobAsk(Message, frozen=True, tag="job?"):
    """User -> controller: the picture of this job."""

    job: Job


class JobAnswer(Message, frozen=True, tag="job"):
    """Controller -> user: parts of the agents that answered, the event log, what Slurm says; or a refusal."""

    parts: tuple[InspectPart, ...] = ()
    events: tuple[EventRecord, ...] = ()
    slurm: dict[str, str] = {}
    missing: tuple[str, ...] = ()
    error: str = ""


PeerMessage = (
    Ping
    | ProbeAsk
    | ProbeAnswer
    | Obituary
    | Collect
    | InventoryUp
    | Summons
    | PlanDown
    | PlanAck
    | Go
    | NeedRound
    | RoundLost
    | VoteUp
    | WordDown
    | PullAsk
    | PullHead
    | InspectAsk
    | InspectPart
    | Registration
    | Report
    | EventsUp
    | Release
    | Notice
    | HoldersAsk
    | Holders
    | JobAsk
    | JobAnswer
)

decoder: Strict[PeerMessage] = Strict(msgspec.msgpack.Decoder(PeerMessage))
encode = msgspec.msgpack.Encoder().encode

# The version with which a message came; all others are of version 1. A field that is added to a message has a default
# and needs no entry: older ends skip it.
SINCE: dict[type[Message], int] = {Summons: 2, Notice: 2}


def known(message: Message, proto: int) -> bool:
    """Whether an end that speaks this protocol knows such a message; to any other it would be the end of the link."""
    return SINCE.get(type(message), 1) <= proto
