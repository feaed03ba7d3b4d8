"""Messages that ask for a job's inspect document, and the document: each agent's holdings and events.

Users ask the controller, which asks the agents. Without a controller, users ask the agents.
"""

from __future__ import annotations

import msgspec

from gemini_hpc.core.domains import Separation
from gemini_hpc.core.numbers import (
    Blocks,
    Bytes,
    Count,
    Epoch,
    Job,
    Port,
    Restart,
    Round,
    SomeBlocks,
    Time,
    TrainingName,
    Version,
)
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.traffic import Duration, Point, TimelineState, TrafficState


class EventRecord(msgspec.Struct, frozen=True):
    """A line of a job's event log.

    Attributes:
        t: Time of the event.
        name: Name.
        host: Host.
        restart: Incarnation of the job.
        version: Version of the training; 0: none.
        detail: Sentence.
    """

    t: Time
    name: str
    host: str
    restart: Restart
    version: Version = 0
    detail: str = ""


class RecordAsk(msgspec.Struct, frozen=True):
    """A request for the traffic that this rank has recorded."""

    training: str
    rank: Count


class InspectAsk(Message, frozen=True, tag="inspect?"):
    """A request for what the agent holds and, on a `query` connection, what one rank has recorded.

    The rank's record is requested in a field, not in a message of its own. An agent that does not know the field then
    answers without the record.
    """

    request: int = 0
    record: RecordAsk | None = None


class HeldSlot(msgspec.Struct, frozen=True):
    """A slot as its holder sees it.

    Attributes:
        state: empty, filling or complete.
        verified: Unix time of the last check.
        members: The slot holds parity instead of a copy of the rank's shard. Each entry is a rank of the stripe and
            its home.
        blocks: Number of parity blocks.
    """

    training: str
    rank: Count
    world: Count
    home: Count
    slot: int
    state: str
    stamp: Stamp | None
    bytes: Bytes
    used: Bytes
    since: Time
    verified: Time
    members: tuple[tuple[Count, Count], ...] = ()
    blocks: SomeBlocks = 1


class TierState(msgspec.Struct, frozen=True):
    """The root's knowledge of a training on the tier. 0 and "" stand for an agent of an earlier version.

    Attributes:
        stored: Newest version on the tier.
        time: Unix time at which that version was complete.
        saving: Version that is being saved.
        written: Bytes of it written so far.
        problem: Reason why the last save did not complete.
        keeping: Names that are still to be given.
        kept: Names given last, each with its version.
        interval_s: Time from one save to the next, in seconds.
        interval_reason: Reason for that interval.
    """

    directory: str
    stored: Stamp | None = None
    time: Time = 0.0
    saving: Stamp | None = None
    written: Bytes = 0
    problem: str = ""
    keeping: tuple[TrainingName, ...] = ()
    kept: tuple[tuple[TrainingName, Stamp], ...] = ()
    interval_s: Duration = 0.0
    interval_reason: str = ""


class PaceState(msgspec.Struct, frozen=True):
    """The pace of a training on one node with ranks of it.

    Attributes:
        silent_s: Seconds since a rank here last began to save a version.
        usual_s: Usual seconds from one such version to the next in this launch.
        longest_s: Longest seconds from one such version to the next in this launch.
        stalled_s: The site's setting for this node.
    """

    silent_s: Duration
    usual_s: Duration
    longest_s: Duration
    stalled_s: Duration = 120.0


class TrainingState(msgspec.Struct, frozen=True):
    """A training on one node.

    Attributes:
        state: arming, protected, degraded, recovering or finished.
        traffic: State of those `ranks` that reported theirs.
        tier: Sent by the root of a job that has a tier.
        pace: Present if connected ranks have saved twice.
        hung: Rank that blocks the others, and its place, if the agents found that the training hangs.
        live: Ranks whose shards this node does not hold but could copy from the live state of its own ranks.
    """

    name: str
    world: Count
    sealed: Stamp | None
    state: str
    ranks: tuple[int, ...]
    note: str = ""
    traffic: tuple[tuple[Count, TrafficState], ...] = ()
    tier: TierState | None = None
    pace: PaceState | None = None
    hung: str = ""
    live: tuple[Count, ...] = ()


class Record(msgspec.Struct, frozen=True):
    """The record of one rank: its newest timeline, and its overhead over time."""

    training: str
    rank: Count
    timeline: TimelineState | None
    series: tuple[Point, ...]


class CpuState(msgspec.Struct, frozen=True):
    """The processors that an agent uses. None: not known yet.

    Attributes:
        cores: Average number of cores over the last minute.
        allowed_cores: Average that versions are made rarer for.
        version_s: Core-seconds from one seal to the next, of the latest versions.
        gb_s: The same for each GB of the copies on this node.
    """

    cores: Duration
    allowed_cores: Duration
    version_s: Duration | None = None
    gb_s: Duration | None = None


class InspectPart(Message, frozen=True, tag="inspect"):
    """An agent's part of the inspect document.

    Attributes:
        unprotected: Reason why the recovery round is not over, if the round takes long.
        kept_until: Unix time at which a detached agent frees its copies; 0.0: never.
        spares: Number of spare nodes the job was submitted with.
        without: Nodes that the job has lost and continues without.
        after: Job that this job continues from.
        taken: Versions taken over from that job, by training, under that job's stamps.
        not_taken: Reason why not all versions were taken over.
        parity: Parity blocks in a row of a group of `replicas` nodes; 0: whole copies.
        domains: Groups of nodes that share a failure domain; None: none is known.
        cpu: The processors that the agent uses; None: the agent does not measure them.
        rdma: The port for RDMA, and why TCP serves in its place; "": RDMA is off.
    """

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
    trainings: tuple[TrainingState, ...]
    held: tuple[HeldSlot, ...]
    events: tuple[EventRecord, ...]
    suspects: tuple[str, ...]
    dead: tuple[str, ...]
    request: int = 0
    record: Record | None = None
    problem: str = ""
    unprotected: str = ""
    kept_until: Time = 0.0
    spares: Count = 0
    without: tuple[str, ...] = ()
    after: Job = 0
    taken: tuple[tuple[TrainingName, Stamp], ...] = ()
    not_taken: str = ""
    parity: Blocks = 0
    domains: Separation | None = None
    cpu: CpuState | None = None
    rdma: str = ""


class JobAsk(Message, frozen=True, tag="job?"):
    """A request for the inspect document of this job (user -> controller)."""

    job: Job


class JobRow(msgspec.Struct, frozen=True):
    """A job in a list.

    Attributes:
        slurm: Slurm's state of the job.
        nodes: Number of nodes of its newest incarnation.
        restarts: Number of the newest incarnation.
        recoveries: Number of completed recoveries.
        ended: Unix time; 0: the job has not ended.
        sealed: Newest sealed version in the job's event log; 0: none.
        id: Slurm's way of writing the id (`16_1` for a task of an array); "" where it is not known.
    """

    job: Job
    uid: int
    slurm: str
    nodes: Count
    restarts: Restart
    recoveries: Count
    ended: Time = 0.0
    sealed: Version = 0
    id: str = ""


class JobsAsk(Message, frozen=True, tag="jobs?"):
    """A request for the jobs that the user may see (user -> controller).

    Attributes:
        all: Include jobs that ended more than a day ago.
    """

    all: bool = False


class JobsAnswer(Message, frozen=True, tag="jobs"):
    """The newest jobs, and the number of further ones (controller -> user)."""

    jobs: tuple[JobRow, ...] = ()
    more: int = 0
    error: str = ""


class LemonRow(msgspec.Struct, frozen=True):
    """A node of the job that caused failures before, in any job.

    Attributes:
        last: Unix time of the last failure.
        kinds: One description a failure, the oldest first.
    """

    host: str
    count: Count
    last: Time
    kinds: tuple[str, ...]


class JobAnswer(Message, frozen=True, tag="job"):
    """The controller's answer about a job, or a refusal (controller -> user).

    The message holds the parts of the agents that answered, the event log, Slurm's view, and nodes that caused
    failures before.
    """

    parts: tuple[InspectPart, ...] = ()
    events: tuple[EventRecord, ...] = ()
    slurm: dict[str, str] = msgspec.field(default_factory=dict)
    missing: tuple[str, ...] = ()
    error: str = ""
    lemons: tuple[LemonRow, ...] = ()
