"""Messages on the agent's local socket (AF_UNIX, SOCK_SEQPACKET), one JSON object a packet.

A client sends one request and reads one reply, in order. File descriptors travel beside the reply (or
beside `HandBack`) as SCM_RIGHTS. Packets are at most `MAX_PACKET_BYTES`. The agent checks SO_PEERCRED:
the job's owner or root. `page` in `Welcome` is a read-only memory page that the agent writes (`ControlPage`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.core.attempts import NOTHING, End
from gemini_hpc.core.culprits import Cause
from gemini_hpc.core.moments import UNCOUNTED, Moment
from gemini_hpc.core.numbers import (
    MAX_RANKS,
    Blocks,
    Bytes,
    ClusterName,
    Count,
    Epoch,
    Job,
    JobKey,
    Port,
    Restart,
    Seconds,
    SetName,
    StepName,
    TierInterval,
    Time,
    Version,
)
from gemini_hpc.core.parity import MAX_MEMBERS
from gemini_hpc.core.sequence import Nth, Series
from gemini_hpc.wire import version
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.stored import Reason, Tier
from gemini_hpc.wire.traffic import TimelineState, TrafficState

MAX_PACKET_BYTES = 64 * 1024
MAX_KEPT_BYTES = 40 * 1024
MAX_LIVE_NODES = 16
MAX_STRIPE = MAX_MEMBERS

Blob = Annotated[bytes, msgspec.Meta(max_length=MAX_KEPT_BYTES)]
Key = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{8,64}\Z")]


class Message(msgspec.Struct, frozen=True, tag_field="op", forbid_unknown_fields=False):
    """Base of all local messages; the JSON key `op` names the type."""


# ---- from the prolog, the epilog and `gemini-hpc run` --------------------------------------------------


class Attach(Message, frozen=True, tag="attach"):
    """A new incarnation of the job has been allocated; answered by `Ready` once all agents agree on the map.

    spares: nodes that are not to train as long as others are there; lost: nodes that the agents have lost in this
    incarnation, and go on without (a prolog never says so). hang: seconds after which
    a training that stands still hangs; 0: never, None: as the site says. after: the job of the same owner where this
    one is to go on; 0: none. parity: no copies, but so many blocks of it in a row of a group of
    `replicas` nodes (`core.parity`). key: random, of the submission; cluster: as slurm.conf calls it. bereft: an
    earlier agent of the job here has gone with its directory.
    """

    job: Job
    restart: Restart
    nodelist: str
    node: str
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
    bereft: bool = False


class Ready(Message, frozen=True, tag="ready"):
    """The agents agreed (`state="mapped"`), or could not within the bound (`state="unmapped"`). absent: hosts that
    this agent waits for, and whose agents cannot be reached."""

    state: str
    absent: tuple[str, ...] = ()


class Epilog(Message, frozen=True, tag="epilog"):
    """The job (or this incarnation of it) has ended on this node."""

    job: Job
    restart: Restart
    exit_code: str = ""


class VerdictRequest(Message, frozen=True, tag="verdict?"):
    """What does the agent know of the job's nodes? Asked on a communication error and between steps."""


class StepEnd(msgspec.Struct, frozen=True):
    """The first end of a step, where it is known; given_up: why its launchers start nothing like it again."""

    step: StepName
    end: End = NOTHING
    given_up: Reason = ""


class Verdict(Message, frozen=True, tag="verdict"):
    """Hosts whose silence was confirmed by other peers, hosts only suspected, and hosts heard of recently.

    sealed: the newest sealed [epoch, version] of all sets, [0, 0] without one; begun: the newest version that a rank
    of this node has begun to save since the last recovery round; spared: spares make up for the dead. last: of the
    newest step of whose end something is known.
    """

    dead: tuple[str, ...] = ()
    suspect: tuple[str, ...] = ()
    alive: tuple[str, ...] = ()
    sealed: tuple[Epoch, Version] = (0, 0)
    begun: Version = 0
    spared: bool = False
    last: StepEnd | None = None


# ---- from launchers ----------------------------------------------------------------------------------


class LaunchRequest(Message, frozen=True, tag="launch?"):
    """From the launcher of one rank, which is in this attempt of its step: answered by `LaunchState` as soon as there
    is a later one, or none is to come, or after `wait_s`.

    attempt: -1 in a job with spares before the first: the launcher does not know yet whether its node trains. failed:
    why the rank has ended, so that all ranks begin the next attempt; done: it has ended with success; over: why the
    launcher begins no other, given_up: nor is a new step to begin; idle: it has no rank now, and is to hear of the
    step's success, too. end: what the end of its rank shows, where that was not the launcher's doing (an earlier
    version tells `cause` only); unhealthy: what the site's health check says.
    """

    step: StepName
    attempt: Annotated[int, msgspec.Meta(ge=-1, le=MAX_RANKS)]
    failed: Reason = ""
    done: bool = False
    over: Reason = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    idle: bool = False
    rank: Count = 0
    cause: Cause | None = None
    unhealthy: Reason = ""
    end: End | None = None
    given_up: bool = False

    @property
    def shown(self) -> End | None:
        """Return what the end of the rank shows, if anything is told of it."""
        if self.end is not None or (self.cause is None and not self.failed):
            return self.end
        return End(self.failed, self.cause or Cause.CONSEQUENCE, self.rank)


class Place(msgspec.Struct, frozen=True):
    """A node's place among those that train: its node rank (-1: it is a spare), how many there are, and where the
    ranks meet: the host of node rank 0, and the first port of this incarnation's steps."""

    node_rank: Annotated[int, msgspec.Meta(ge=-1, le=MAX_RANKS)]
    nodes: Count
    master: str
    port: Port


class LaunchState(Message, frozen=True, tag="launch"):
    """The attempt in which all ranks of the step are to be; first, before: how the two before it ended; over: why
    none follows; last: how this one ended; place: in a job with spares, where the agents agree on the map; done: a
    rank has ended with success; left_out: `over` is so for this node alone, and is no failure; check: the site's
    health check, which tells of the node."""

    attempt: Count
    first: End = NOTHING
    before: End = NOTHING
    over: Reason = ""
    last: End = NOTHING
    place: Place | None = None
    done: bool = False
    left_out: bool = False
    check: Annotated[str, msgspec.Meta(max_length=4096)] = ""


# ---- from trainers -------------------------------------------------------------------------------------


class OfRank(Message, frozen=True):
    """Base of what is said of the shard of one training rank (`rank`) in one set."""

    set: str
    rank: Count


class Hello(Message, frozen=True, tag="hello"):
    """First message of a training rank. The reply, `Welcome`, comes when the recovery round is over.

    `step` identifies one launch of the training (SLURM_JOB_ID.SLURM_STEP_ID): a new value on any node
    starts a new recovery round. `rejoin` is set by a trainer that was welcomed before and lost its agent.
    It speaks protocols `least` to `most`. `tier`: what its program has chosen. `restarts`: what has started it starts
    it again when it fails. nth: which training of the name `set` this is, in its process; series: what is the same in
    each start of its step (`core.sequence`). Beside it may be one descriptor: the rank's progress page.
    """

    least: int
    most: int
    set: str
    rank: Count
    world: Count
    local_rank: Count
    step: str
    pid: int
    rejoin: bool = False
    tier: Tier = Tier()
    restarts: bool = False
    nth: Nth = 1
    series: Series = ""


class Welcome(Message, frozen=True, tag="welcome"):
    """Beside it one descriptor: the control page of this set.

    `chosen_epoch`/`chosen_version`: the version to resume from; version 0 means none. `chosen_world` is
    the number of shards of that version; `stored`: it comes from the tier. `lost` says, one sentence a
    shard, why memory could not serve; `notice` what the controller wants the job's users to know; `proto`
    the protocol that both speak from here on. `rejected`: what ranks have rejected, one sentence each; `fresh`: one
    of them allowed to begin anew where nothing else is left. after: the job that the chosen version was taken over
    from; 0: this one has made it itself. parity: as of `Attach`, or fewer where nodes are. group: node ranks, as
    `placement.ring` has them. set: what the training is called in all further messages; "": as it said itself.
    closed: it has been closed by all ranks before, at this version; passed: so have all of its step, and a later step
    has begun. others: where nothing is chosen, versions of trainings that are not closed, and of which no rank has
    said hello here.
    """

    job: int
    restart: int
    epoch: int
    node_rank: int
    nodes: int
    replicas: int
    chosen_epoch: int = 0
    chosen_version: int = 0
    chosen_world: int = 0
    stored: bool = False
    lost: tuple[str, ...] = ()
    notice: str = ""
    proto: int = version.CURRENT
    rejected: tuple[str, ...] = ()
    fresh: bool = False
    after: int = 0
    parity: Blocks = 0
    group: tuple[int, ...] = ()
    set: str = ""
    closed: Version = 0
    passed: bool = False
    others: tuple[str, ...] = ()


class Bequeath(OfRank, frozen=True, tag="bequeath"):
    """From an agent of another job of the owner's on this node, which has no room for a copy of its own: give me the
    memory of this one. Answered by `Copy` with its descriptor, and this agent has it no more."""

    heir: Job
    epoch: Epoch
    version: Version
    digest: str


class Register(OfRank, frozen=True, tag="register"):
    """Reserve (or find again) both slots of one shard on this node.

    rank: the training rank whose shard it is; home: node rank where that training rank lives;
    bytes: size of one slot. pushed: the home's agent fills the slots, this rank only keeps their memory; bytes 0
    then: as large as they are now (`ControlPage.grown`). of: not the shard is meant, but the parity beside it, of
    these ranks' (each with its home), which their homes' agents fill; answered without descriptors. passed: versions
    up to this one will not come into it, or not again.
    """

    world: Count
    home: Count
    bytes: Bytes
    pushed: bool = False
    of: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=MAX_STRIPE)] = ()
    passed: Version = 0


class Slots(Message, frozen=True, tag="slots"):
    """Beside it two descriptors (memfd of slot 0 and slot 1), each of `bytes` bytes."""

    bytes: int


class Begin(OfRank, frozen=True, tag="begin"):
    """May a slot be filled with `version` (of the epoch of `Welcome`)? Answered by `Begun` or `Refused`."""

    version: Version


UNLIKE = "what is replicated here is not what"  # begins the error that ends all filling of a shard


class Fill(OfRank, frozen=True, tag="fill"):
    """May this rank fill what it has itself of `version` into the slot of another rank's shard, which that one's
    agent pushes here? Answered by `Begun` or `Refused`; after `Begun` comes `Filled`. An error that begins with
    UNLIKE: no more of them."""

    version: Version


class Filled(OfRank, frozen=True, tag="filled"):
    """These ranges of bytes are there, and this rank writes no more. None: all have to come."""

    version: Version
    there: tuple[tuple[Bytes, Bytes], ...] = ()


class Begun(Message, frozen=True, tag="begun"):
    """Fill this slot. note: a line for the users of the job, which this rank prints."""

    slot: int
    note: str = ""


class Refused(Message, frozen=True, tag="refused"):
    """Not now (R1/R2), with the reason; skip this save and say so."""

    reason: str


class Landed(OfRank, frozen=True, tag="landed"):
    """The slot holds all `used` bytes of `version`. digest (`core.digest`): made at the shard's home; "" where that
    is this node, whose agent makes it.

    The agent reads the bytes before it counts the copy (R5); the reply (`Ok`) does not wait for that. The commit
    record has the digest then.
    """

    version: Version
    slot: int
    used: Bytes
    digest: str = ""


class Abort(OfRank, frozen=True, tag="abort"):
    """The slot will not be completed with this version; it becomes void."""

    version: Version
    slot: int


class Fetch(OfRank, frozen=True, tag="fetch"):
    """Give me the chosen version of a shard; pulled from its holders where this node has no copy."""


class Copy(Message, frozen=True, tag="copy"):
    """Beside it one read-only descriptor with `used` bytes of a verified copy."""

    epoch: int
    version: int
    bytes: int
    used: int
    digest: str


class OpenPush(OfRank, frozen=True, tag="push"):
    """I fill my shard's slots: bring its versions to this holder (a node rank). Answered by `Ok`, beside it one
    descriptor: a channel (SOCK_SEQPACKET) for the messages below, each answered in order, also when several are on
    their way. The agent closes it when a version that it had begun to send is lost; another can be opened."""

    holder: Count


class Event(Message, frozen=True, tag="event"):
    """Something for the event log (`resumed`, `first_iteration`, `skipped`, `degraded`, ...); t: Unix time."""

    name: str
    version: Version
    t: Time
    detail: str = ""


class Finished(OfRank, frozen=True, tag="finished"):
    """The rank has closed its checkpointer after this version: its training succeeded."""

    version: Version = 0


class Reject(OfRank, frozen=True, tag="reject"):
    """What this rank has loaded, this version, is bad, for this reason: it, and all that came of it, are not to be
    chosen again. fresh: where nothing else is left the training may begin anew. Answered by `Ok` when that is on
    disk, else by `Error` with the reason."""

    version: Version
    reason: Reason
    fresh: bool = False


class KeepVersion(OfRank, frozen=True, tag="keep-version"):
    """This version is to stay on the tier for good, under this name, or the first one after it that can be saved.
    Answered by `Ok` when the agent will see to it, else by `Error` with the reason."""

    version: Version
    name: SetName


class HandBack(OfRank, frozen=True, tag="handback"):
    """After an agent's death: one slot of a shard, its descriptor beside it; revalidated by digest.

    digest empty: the slot holds nothing complete (it is handed back for its memory only).
    """

    world: Count
    home: Count
    bytes: Bytes
    slot: int
    epoch: Epoch
    version: Version
    used: Bytes
    digest: str
    pushed: bool = False


# ---- from trainers, on a channel of `OpenPush` --------------------------------------------------------


class PushOffer(Message, frozen=True, tag="offer"):
    """The slot that is being filled with `version` has `used` bytes, which do not change any more: does the holder
    take them? `Ok`, `Taken` or `Refused`. The agent reads them beside their way. base: a version of the same epoch of
    which the ranges of bytes `kept` have not changed: the holder's slot may still have them."""

    version: Version
    used: Bytes
    base: Version = 0
    kept: tuple[tuple[Bytes, Bytes], ...] = ()


class Taken(Message, frozen=True, tag="taken"):
    """In the reply to `PushOffer`: the holder has these ranges of bytes, and they do not go."""

    there: tuple[tuple[Bytes, Bytes], ...]


class PushChunk(Message, frozen=True, tag="chunk"):
    """The slot's next `length` bytes may go; `Ok` when they are at the holder."""

    length: Bytes


class PushDone(Message, frozen=True, tag="done"):
    """The end of a version. Answered by `Ok` when the holder has found the digest that this agent has read."""


class LiveOn(OfRank, frozen=True, tag="live-on"):
    """The ranks of these nodes have all tensors of this rank's shard as well, with every version from the next one
    on. none: no other node has. Answered by `Ok`."""

    nodes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_LIVE_NODES)]


class Sketched(OfRank, frozen=True, tag="sketched"):
    """The slot that this rank fills with its own shard has directory and small state of this version; what the
    tensors are is still to come. Only the newest counts. areas: bytes of directory and tensors, and the most of the
    small state, which has `small_bytes` now. moment: for the slot's header. Answered by `Ok`."""

    version: Version
    slot: Count
    small_bytes: Bytes
    areas: tuple[Bytes, Bytes, Bytes]
    moment: Moment = UNCOUNTED


class OpenRescue(OfRank, frozen=True, tag="rescue"):
    """This rank can copy its live tensors into slots, of its own shard and of others', when their holders have died.
    Answered by `Ok`, beside it one descriptor: a channel (SOCK_SEQPACKET) on which the agent asks: `Still`, then
    `CopyLive` as often as it wants, `Complete`, and `GoOn`."""


# ---- from the agent, on a channel of `OpenRescue`; the rank answers each but the last ------------------


class Still(Message, frozen=True, tag="still"):
    """Change no tensor of the state until `GoOn`, or for `wait_s`, and bring the version that is on its way into the
    slots at once, whatever else has the network; answered by `Standing`."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]


class Standing(Message, frozen=True, tag="standing"):
    """The tensors are those of this completed version; 0: they are being changed, or are not to be copied."""

    version: Version


class CopyLive(Message, frozen=True, tag="copy-live"):
    """Beside it one descriptor of `bytes` bytes: a slot with header, directory and small state of the shard of this
    rank. Fill in the tensors. Answered by `Copied`."""

    rank: Count
    version: Version
    bytes: Bytes


class Copied(Message, frozen=True, tag="copied"):
    """whole: every tensor of the shard is there, as far as this rank knows; else why not."""

    whole: bool
    why: Reason = ""


class Complete(Message, frozen=True, tag="complete"):
    """Wait until the rank has saved its own shard of the version at which it stands, or given that up; for `wait_s`
    at most. Answered by `Copied`, or by `Standing` where it is still at work."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]


class GoOn(Message, frozen=True, tag="go-on"):
    """The tensors may change again."""


class Traffic(OfRank, frozen=True, tag="traffic"):
    """How this rank's checkpoints travel now; the newest is shown, and its overhead joins a series."""

    state: TrafficState


class Timeline(OfRank, frozen=True, tag="timeline"):
    """One iteration of this rank as it was recorded; the newest is kept."""

    timeline: TimelineState


class Keep(OfRank, frozen=True, tag="keep"):
    """Keep these bytes for this rank, for as long as the agent lives: across recovery rounds and requeues.

    `key` says what they are good for: what was kept with another key is dropped.
    """

    key: Key
    data: Blob


class Recall(OfRank, frozen=True, tag="recall"):
    """What was kept with this key? Answered by `Kept`."""

    key: Key


class Kept(Message, frozen=True, tag="kept"):
    """data None: nothing with this key."""

    data: Blob | None = None


# ---- replies in general --------------------------------------------------------------------------------


class Ok(Message, frozen=True, tag="ok"):
    """Done. In the reply to `Epilog`, state is released, detached, or hold: detached, and this node is to hold the
    survivors of incarnation `restart`, because no controller answers. check: the site's health check is worth its
    time on this node."""

    state: str = ""
    restart: int = 0
    check: bool = False


class Error(Message, frozen=True, tag="error"):
    """Refused, in one sentence for the user. later: what was asked for may be had later."""

    error: str
    later: bool = False


Request = (
    Attach
    | Bequeath
    | Epilog
    | VerdictRequest
    | LaunchRequest
    | Hello
    | Register
    | Begin
    | Landed
    | Abort
    | Fill
    | Filled
    | Fetch
    | OpenPush
    | LiveOn
    | Sketched
    | OpenRescue
    | Event
    | Finished
    | Reject
    | KeepVersion
    | HandBack
    | Traffic
    | Timeline
    | Keep
    | Recall
)
PushRequest = PushOffer | PushChunk | PushDone
RescueRequest = Still | CopyLive | Complete | GoOn
RescueReply = Standing | Copied
Reply = Ready | Verdict | LaunchState | Welcome | Slots | Begun | Refused | Copy | Kept | Taken | Ok | Error

request_decoder: Strict[Request] = Strict(msgspec.json.Decoder(Request))
push_decoder: Strict[PushRequest] = Strict(msgspec.json.Decoder(PushRequest))
rescue_decoder: Strict[RescueRequest] = Strict(msgspec.json.Decoder(RescueRequest))
rescued_decoder: Strict[RescueReply] = Strict(msgspec.json.Decoder(RescueReply))
reply_decoder: Strict[Reply] = Strict(msgspec.json.Decoder(Reply))
encode = msgspec.json.Encoder().encode


def hello(
    *,
    set: str,
    rank: int,
    world: int,
    local_rank: int,
    step: str,
    pid: int,
    rejoin: bool = False,
    tier: Tier = Tier(),  # noqa: B008 (frozen)
    restarts: bool = False,
    nth: int = 1,
    series: str = "",
) -> Hello:
    """A `Hello` in all versions that this end speaks."""
    return Hello(
        version.OLDEST,
        version.CURRENT,
        set,
        rank,
        world,
        local_rank,
        step,
        pid,
        rejoin,
        tier,
        restarts,
        nth,
        series,
    )
