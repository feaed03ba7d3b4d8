"""Messages on the agent's local socket (AF_UNIX, SOCK_SEQPACKET), one JSON object a packet.

A client sends one request and reads one reply, in order. File descriptors travel with the reply (or with `HandBack`)
as SCM_RIGHTS. Packets hold at most `MAX_PACKET_BYTES`. The agent checks SO_PEERCRED: only the job's owner and root
are accepted. `page` in `Welcome` is a read-only memory page that the agent writes (`ControlPage`).

The socket is `run_dir/JOBID/agent.sock`. Any request may be answered by `Error`, and an unknown request always is.
The connection goes on.
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
    StepName,
    TierInterval,
    Time,
    TrainingName,
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
    """The base of all local messages; the JSON key `op` names the type."""


# ---- requests of the prolog, the epilog and `gemini-hpc run` -------------------------------------------


class Attach(Message, frozen=True, tag="attach"):
    """A new incarnation of the job that was allocated; answered by `Ready` once all agents agree on the map.

    Attributes:
        spares: Number of nodes that do not train as long as other nodes are there.
        lost: Nodes that the agents have lost in this incarnation and continue without; never set by a prolog.
        hang: Seconds after which a training without progress counts as hung; 0: never; None: the site's setting.
        after: Job of the same owner that this job continues from; 0: none.
        parity: Parity blocks in a row of a group of `replicas` nodes, kept instead of copies (`core.parity`).
        key: Random key of the submission.
        cluster: Cluster name in slurm.conf.
        bereft: An earlier agent of the job on this node has disappeared together with its directory.
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
    """The answer to `Attach`: all agents agreed (`mapped`), or did not within the limit (`unmapped`).

    Attributes:
        absent: Hosts that this agent waits for and whose agents it cannot reach.
        sealed: Newest sealed version that agents hold, from which another start could resume; 0: none.
    """

    state: str
    absent: tuple[str, ...] = ()
    sealed: Version = 0


class Epilog(Message, frozen=True, tag="epilog"):
    """A notice that the job (or this incarnation of it) has ended on this node."""

    job: Job
    restart: Restart
    exit_code: str = ""


class VerdictRequest(Message, frozen=True, tag="verdict?"):
    """A question about the state of the job's nodes, asked on a communication error and between steps."""


class StepEnd(msgspec.Struct, frozen=True):
    """The first end of a step, if known.

    Attributes:
        given_up: Reason why its launchers start no such step again.
    """

    step: StepName
    end: End = NOTHING
    given_up: Reason = ""


class Verdict(Message, frozen=True, tag="verdict"):
    """The agent's view of the job's hosts and of the newest step that ended.

    Attributes:
        dead: Hosts whose silence other peers confirmed.
        suspect: Hosts that are only suspected.
        alive: Hosts that sent a message recently.
        sealed: Newest sealed [epoch, version] of all trainings; [0, 0]: none.
        begun: Newest version that a rank of this node has begun to save since the last recovery round.
        spared: Spares replace the dead nodes.
        last: Newest step whose end is at least partly known.
        unmapped: Incarnations in a row, the present one included, that began without the agents of all nodes.
    """

    dead: tuple[str, ...] = ()
    suspect: tuple[str, ...] = ()
    alive: tuple[str, ...] = ()
    sealed: tuple[Epoch, Version] = (0, 0)
    begun: Version = 0
    spared: bool = False
    last: StepEnd | None = None
    unmapped: Count = 0


# ---- requests of launchers ----------------------------------------------------------------------------


class LaunchRequest(Message, frozen=True, tag="launch?"):
    """A request of the launcher of one rank, which is in this attempt of its step.

    The agent answers with `LaunchState` as soon as a later attempt exists, no attempt follows, or `wait_s` has
    passed.

    Attributes:
        attempt: The attempt; -1 before the first one of a job with spares, while the launcher does not know yet
            whether its node trains.
        failed: Reason for the end of the rank; all ranks then begin the next attempt.
        done: The rank ended with success.
        over: Reason why the launcher begins no other attempt.
        wait_s: Longest wait for the answer, in seconds.
        idle: The launcher has no rank now, and waits for the success of the step as well.
        cause: Cause of the end; the only sign that an earlier version sends.
        unhealthy: Result of the site's health check if it failed.
        end: Evidence of the rank's end, unless the launcher itself ended the rank.
        given_up: No new step may begin either.
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
        """Return the evidence of the rank's end, if the launcher reported any."""
        if self.end is not None or (self.cause is None and not self.failed):
            return self.end
        return End(self.failed, self.cause or Cause.CONSEQUENCE, self.rank)


class Place(msgspec.Struct, frozen=True):
    """A node's place among the nodes that train.

    Attributes:
        node_rank: Node rank; -1: the node is a spare.
        nodes: Number of nodes that train.
        master: Host of node rank 0, where the ranks meet.
        port: First port of this incarnation's steps.
    """

    node_rank: Annotated[int, msgspec.Meta(ge=-1, le=MAX_RANKS)]
    nodes: Count
    master: str
    port: Port


class LaunchState(Message, frozen=True, tag="launch"):
    """The attempt in which all ranks of the step belong.

    Attributes:
        first: End of the previous attempt.
        before: End of the attempt before that.
        over: Reason why no attempt follows.
        last: End of this attempt.
        place: Place of the node, sent in a job with spares once the agents agree on the map.
        done: A rank has ended with success.
        left_out: `over` holds for this node alone and is no failure.
        check: Path of the site's health check program, which tests this node.
    """

    attempt: Count
    first: End = NOTHING
    before: End = NOTHING
    over: Reason = ""
    last: End = NOTHING
    place: Place | None = None
    done: bool = False
    left_out: bool = False
    check: Annotated[str, msgspec.Meta(max_length=4096)] = ""


# ---- requests of training ranks ------------------------------------------------------------------------


class OfRank(Message, frozen=True):
    """The base of messages about the shard of one training rank (`rank`) in one training."""

    training: str
    rank: Count


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a training rank; `Welcome` answers once the recovery round is over.

    One descriptor may accompany it: the rank's progress page.

    Attributes:
        least: Oldest protocol that the rank speaks.
        most: Newest protocol that the rank speaks.
        step: Identity of one launch of the training (SLURM_JOB_ID.SLURM_STEP_ID). A new value on any node starts a
            new recovery round.
        rejoin: The rank was welcomed before and lost its agent.
        tier: The program's choice.
        restarts: The process that started the rank starts it again if it fails.
        nth: Number of this training among those named `set` in its process.
        series: Value that is the same in each start of its step (`core.sequence`).
    """

    least: int
    most: int
    training: str
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
    """The answer to `Hello`, with one descriptor: the control page of this training.

    Attributes:
        parity: Value of `Attach`, or less if there are fewer nodes.
        chosen_epoch: Epoch of the version to resume from.
        chosen_version: Version to resume from; 0: none.
        chosen_world: Number of shards of that version.
        stored: The version comes from the tier.
        lost: Reasons why memory could not serve, one sentence a shard.
        notice: Message of the controller for the job's users.
        proto: Protocol that both ends speak from here on.
        rejected: Versions that ranks have rejected, one sentence each.
        fresh: A rejecting rank allowed the training to begin anew if no other version is left.
        after: Job that the chosen version was taken over from; 0: this job made the version itself.
        group: Node ranks in the order of `placement.list_ring`.
        training: Name of the training in all further messages; "": the name in `Hello`.
        closed: Version at which all ranks have closed the training before.
        passed: All ranks have closed all trainings of its step as well, and a later step has begun.
        others: If no version is chosen: versions of trainings that are not closed and of which no rank has sent
            `Hello` here.
        stopped_at: Unix time of the first sign that the training had stopped; 0: unknown.
        reached: Newest step that had been completed by then; 0: unknown.
        changes: Changes of the job's nodes since, one sentence each.
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
    training: str = ""
    closed: Version = 0
    passed: bool = False
    others: tuple[str, ...] = ()
    stopped_at: Time = 0.0
    reached: Version = 0
    changes: tuple[str, ...] = ()


class TakeOver(OfRank, frozen=True, tag="take-over"):
    """A request for the memory of a copy, sent by an agent of the owner's other job on this node.

    The sender has no room for a copy of its own. `Copy` answers with the descriptor, and this agent no longer holds
    the copy.
    """

    successor: Job
    epoch: Epoch
    version: Version
    digest: str


class Register(OfRank, frozen=True, tag="register"):
    """A request to reserve (or find again) both slots of one shard on this node.

    Attributes:
        rank: Training rank whose shard it is.
        home: Node rank of the node where that rank runs.
        bytes: Size of one slot. With `pushed`, 0 means the current size (`ControlPage.grown`).
        pushed: The home's agent fills the slots and this rank only keeps their memory.
        members: Ranks (each with its home) whose parity is meant instead of the shard. Their homes' agents fill it;
            the answer has no descriptors.
        passed: Versions up to this one will not be saved into the slots, or not again.
    """

    world: Count
    home: Count
    bytes: Bytes
    pushed: bool = False
    members: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=MAX_STRIPE)] = ()
    passed: Version = 0


class Slots(Message, frozen=True, tag="slots"):
    """The answer to `Register`, with two descriptors (memfd of slot 0 and slot 1) of `bytes` bytes each."""

    bytes: int


class BeginVersion(OfRank, frozen=True, tag="begin-version"):
    """A request to fill a slot with `version` (of `Welcome`'s epoch); answered by `Begun` or `Refused`."""

    version: Version


UNLIKE = "what is replicated here is not what"  # prefix of the error that ends all filling of a shard


class Fill(OfRank, frozen=True, tag="fill"):
    """A request to fill the rank's own part of `version` into the slot of another rank's shard.

    The other rank's agent pushes the shard here. The answer is `Begun`, followed by the rank's `Filled`, or
    `Refused`. An error that begins with UNLIKE ends all such fills.
    """

    version: Version


class Filled(OfRank, frozen=True, tag="filled"):
    """A report of the byte ranges that this rank has filled; the rank writes no more.

    An empty `present` means that all bytes must come from the push.
    """

    version: Version
    present: tuple[tuple[Bytes, Bytes], ...] = ()


class Unfilled(OfRank, frozen=True, tag="unfilled"):
    """A report that this rank fills no other rank's shard in this version. Only the newest report counts.

    `Ok` answers. The agent does not wait for the rank when the version arrives.
    """

    version: Version


class Begun(Message, frozen=True, tag="begun"):
    """Permission to fill this slot.

    Attributes:
        note: A line for the users of the job, which this rank prints.
    """

    slot: int
    note: str = ""


class Refused(Message, frozen=True, tag="refused"):
    """A refusal for now (R1/R2), with the reason; the rank skips this save and reports the skip."""

    reason: str


class Landed(OfRank, frozen=True, tag="landed"):
    """A report that the slot holds all `used` bytes of `version`.

    The agent reads the bytes before it counts the copy (R5). The reply (`Ok`) does not wait for that read; the commit
    record then has the digest.

    Attributes:
        digest: Digest (`core.digest`) made at the shard's home; "" if that is this node, whose agent makes the
            digest.
    """

    version: Version
    slot: int
    used: Bytes
    digest: str = ""


class Abort(OfRank, frozen=True, tag="abort"):
    """A report that the slot will not be completed with this version; the slot becomes void."""

    version: Version
    slot: int


class Fetch(OfRank, frozen=True, tag="fetch"):
    """A request for the chosen version of a shard, pulled from its holders if this node has no copy."""


class Copy(Message, frozen=True, tag="copy"):
    """The answer with one read-only descriptor, which holds `used` bytes of a verified copy."""

    epoch: int
    version: int
    bytes: int
    used: int
    digest: str


class OpenPush(OfRank, frozen=True, tag="push"):
    """A request of a rank that fills its shard's slots to push the versions to this holder (a node rank).

    `Ok` answers with two descriptors: a channel (SOCK_SEQPACKET) for `PushOffer`, `PushGo` and `PushDone`, and its
    grant page (`wire.grant_page`). The agent closes the channel if a version is lost that it has begun to send; the
    rank can open another one.
    """

    holder: Count


class Event(Message, frozen=True, tag="event"):
    """An entry for the event log (`resumed`, `first_iteration`, `skipped`, `degraded`, ...).

    Attributes:
        t: Unix time in seconds.
    """

    name: str
    version: Version
    t: Time
    detail: str = ""


class Finished(OfRank, frozen=True, tag="finished"):
    """A report that the rank has closed its checkpointer after this version: its training succeeded."""

    version: Version = 0


class Reject(OfRank, frozen=True, tag="reject"):
    """A report that the version which this rank has loaded is bad, with the reason.

    The version and all versions that derive from it are never chosen again. The agent answers `Ok` once the rejection
    is on disk, else `Error` with the reason.

    Attributes:
        fresh: The training may begin anew if no other version is left.
    """

    version: Version
    reason: Reason
    fresh: bool = False


class KeepVersion(OfRank, frozen=True, tag="keep-version"):
    """A request to keep this version on the tier under this name for good.

    If the version cannot be saved, the first later one that can gets the name. The agent answers `Ok` if it accepts
    the request, else `Error` with the reason.
    """

    version: Version
    name: TrainingName


class HandBack(OfRank, frozen=True, tag="handback"):
    """A slot of a shard handed back after an agent's death, with its descriptor; verified again by digest.

    Attributes:
        digest: Digest of the content; "": the slot holds nothing complete and is handed back for its memory only.
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


# ---- requests of training ranks on a channel of `OpenPush` ---------------------------------------------


class PushOffer(Message, frozen=True, tag="offer"):
    """An offer of the version in the slot being filled: its `used` bytes no longer change.

    The answer is `Ok`, `PresentRanges` or `Refused` for the holder. The agent reads the bytes while they are sent.

    Attributes:
        base: A version of the same epoch that the holder's slot may still have.
        kept: Byte ranges that have not changed since `base`.
    """

    version: Version
    used: Bytes
    base: Version = 0
    kept: tuple[tuple[Bytes, Bytes], ...] = ()


class PresentRanges(Message, frozen=True, tag="present"):
    """The reply to `PushOffer` with the byte ranges that the holder already has; they are not sent."""

    present: tuple[tuple[Bytes, Bytes], ...]


class PushGo(Message, frozen=True, tag="go"):
    """A call to look at the grant page, sent only where the agent's thread sleeps. It has no answer."""


class PushDone(Message, frozen=True, tag="done"):
    """Permission to send all that is left of a version at once.

    `Ok` answers once the holder has found the digest that this agent has read.
    """


class LiveOn(OfRank, frozen=True, tag="live-on"):
    """A list of nodes whose ranks also have all tensors of this rank's shard.

    The list holds for every version from the next one on. An empty list means that no other node has them. `Ok`
    answers.
    """

    nodes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_LIVE_NODES)]


class OutlineWritten(OfRank, frozen=True, tag="outline-written"):
    """A report that this rank's slot for its own shard has the directory and small state of this version.

    The tensors are still missing. Only the newest report counts. `Ok` answers.

    Attributes:
        small_bytes: Current bytes of the small state.
        areas: Bytes of the directory, bytes of the tensors, and the maximum bytes of the small state.
        moment: Moment for the slot's header.
    """

    version: Version
    slot: Count
    small_bytes: Bytes
    areas: tuple[Bytes, Bytes, Bytes]
    moment: Moment = UNCOUNTED


class OpenRescue(OfRank, frozen=True, tag="rescue"):
    """An offer to copy live tensors into slots of shards whose holders have died.

    The shards are the rank's own and others. `Ok` answers with one descriptor: a channel (SOCK_SEQPACKET) on which
    the agent sends the requests. The agent sends `Still`, then any number of `CopyLive`, then `Complete` and `GoOn`.
    """


# ---- requests of the agent on a channel of `OpenRescue`; the rank answers each but the last ------------


class Still(Message, frozen=True, tag="still"):
    """A request to change no tensor of the state until `GoOn`, or for `wait_s` seconds.

    `Standing` answers. The rank brings the version in progress into the slots at once, whatever other traffic uses
    the network.
    """

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]


class Standing(Message, frozen=True, tag="standing"):
    """The answer to `Still`: the tensors are those of this completed version.

    Version 0 means that the tensors are being changed, or must not be copied.
    """

    version: Version


class CopyLive(Message, frozen=True, tag="copy-live"):
    """A request to fill the tensors of this rank's shard into a slot of `bytes` bytes; answered by `Copied`.

    One descriptor accompanies it: a slot with header, directory and small state.
    """

    rank: Count
    version: Version
    bytes: Bytes


class Copied(Message, frozen=True, tag="copied"):
    """The result of a copy.

    Attributes:
        whole: Every tensor of the shard is there, as far as this rank knows.
        why: Reason if not.
    """

    whole: bool
    why: Reason = ""


class Complete(Message, frozen=True, tag="complete"):
    """A request to wait until the rank has saved its own shard, or abandoned that save.

    The shard is of the version at which the rank stands. The wait lasts at most `wait_s` seconds. `Copied` answers,
    or `Standing` if the rank is still saving.
    """

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]


class GoOn(Message, frozen=True, tag="go-on"):
    """Permission to change the tensors again."""


class Traffic(OfRank, frozen=True, tag="traffic"):
    """The current traffic of this rank's checkpoints.

    The newest report is shown, and its overhead joins a series.
    """

    state: TrafficState


class Timeline(OfRank, frozen=True, tag="timeline"):
    """A recorded iteration of this rank; the agent keeps the newest."""

    timeline: TimelineState


class CacheBytes(OfRank, frozen=True, tag="cache"):
    """A request to keep these bytes for this rank as long as the agent lives.

    The agent keeps them across recovery rounds and requeues.

    Attributes:
        key: Purpose of the bytes; bytes kept under another key are dropped.
    """

    key: Key
    data: Blob


class FetchCached(OfRank, frozen=True, tag="fetch-cached"):
    """A request for the bytes kept under this key; answered by `CachedBytes`."""

    key: Key


class CachedBytes(Message, frozen=True, tag="cached"):
    """The answer to `FetchCached`; data None: no bytes are kept under this key."""

    data: Blob | None = None


# ---- replies in general --------------------------------------------------------------------------------


class Ok(Message, frozen=True, tag="ok"):
    """A confirmation.

    Attributes:
        state: In the reply to `Epilog`: released, detached, or hold. hold means detached, and this node must hold the
            survivors of incarnation `restart`, because no controller answers.
        check: Running the site's health check on this node is worth its time.
    """

    state: str = ""
    restart: int = 0
    check: bool = False


class Error(Message, frozen=True, tag="error"):
    """A refusal, with one sentence for the user.

    Attributes:
        later: The same request may succeed later.
    """

    error: str
    later: bool = False


Request = (
    Attach
    | TakeOver
    | Epilog
    | VerdictRequest
    | LaunchRequest
    | Hello
    | Register
    | BeginVersion
    | Landed
    | Abort
    | Fill
    | Filled
    | Fetch
    | OpenPush
    | LiveOn
    | OutlineWritten
    | Unfilled
    | OpenRescue
    | Event
    | Finished
    | Reject
    | KeepVersion
    | HandBack
    | Traffic
    | Timeline
    | CacheBytes
    | FetchCached
)
PushRequest = PushOffer | PushGo | PushDone
RescueRequest = Still | CopyLive | Complete | GoOn
RescueReply = Standing | Copied


def describe_refusal(reply: Message) -> str:
    """Return an answer that is not the one wanted, in words."""
    if isinstance(reply, Refused):
        return f"it refuses: {reply.reason}"
    return f"it answers {reply.__struct_config__.tag!r}"


Reply = (
    Ready
    | Verdict
    | LaunchState
    | Welcome
    | Slots
    | Begun
    | Refused
    | Copy
    | CachedBytes
    | PresentRanges
    | Ok
    | Error
)

request_decoder: Strict[Request] = Strict(msgspec.json.Decoder(Request))
push_decoder: Strict[PushRequest] = Strict(msgspec.json.Decoder(PushRequest))
rescue_decoder: Strict[RescueRequest] = Strict(msgspec.json.Decoder(RescueRequest))
rescued_decoder: Strict[RescueReply] = Strict(msgspec.json.Decoder(RescueReply))
reply_decoder: Strict[Reply] = Strict(msgspec.json.Decoder(Reply))
encode = msgspec.json.Encoder().encode
