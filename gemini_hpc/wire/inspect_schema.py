"""Messages that ask for the picture of a job, and the picture: what each of its agents holds and what has happened.

Users ask the controller, which asks the agents; without a controller they ask the agents.
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
    SetName,
    SomeBlocks,
    Time,
    Version,
)
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.traffic import Duration, Point, TimelineState, TrafficState


class EventRecord(msgspec.Struct, frozen=True):
    """One line of a job's event log. t: Unix time in seconds."""

    t: Time
    name: str
    host: str
    restart: Restart
    version: Version = 0
    detail: str = ""


class RecordAsk(msgspec.Struct, frozen=True):
    """What has this rank recorded of its traffic?"""

    set: str
    rank: Count


class InspectAsk(Message, frozen=True, tag="inspect?"):
    """Tell what you hold; and, on a `query` connection, what one rank has recorded. It is asked in a field and not in
    a message of its own, so that an agent which does not know it answers without it."""

    request: int = 0
    record: RecordAsk | None = None


class HeldSlot(msgspec.Struct, frozen=True):
    """One slot as its holder sees it. state: empty, filling, complete; verified: Unix time of the last check.
    of: it has no copy of the rank's shard but the parity beside it, of these ranks' (each with its home), in so many
    blocks."""

    set: str
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
    of: tuple[tuple[Count, Count], ...] = ()
    blocks: SomeBlocks = 1


class TierState(msgspec.Struct, frozen=True):
    """What the root knows of a set on the tier. stored: the newest version there, time: of its end (Unix); saving:
    what is on its way, written: bytes of it; problem: why the last one did not become whole; keeping: names that are
    to be given, kept: the names given last, and the versions that have them; interval_s: from one save to the next,
    interval_reason: why so. 0 and "": an agent of an earlier version."""

    directory: str
    stored: Stamp | None = None
    time: Time = 0.0
    saving: Stamp | None = None
    written: Bytes = 0
    problem: str = ""
    keeping: tuple[SetName, ...] = ()
    kept: tuple[tuple[SetName, Stamp], ...] = ()
    interval_s: Duration = 0.0
    interval_reason: str = ""


class PaceState(msgspec.Struct, frozen=True):
    """How a training comes on, on one node with ranks of it. silent_s: since one here last began to save a version;
    usual_s, longest_s: from one such version to the next in this launch; stalled_s: the site's, for this node."""

    silent_s: Duration
    usual_s: Duration
    longest_s: Duration
    stalled_s: Duration = 120.0


class TrainingState(msgspec.Struct, frozen=True):
    """One set on one node. state: arming, protected, degraded, recovering, finished. traffic: of those `ranks` that
    have told theirs. tier: from the root, of a job that has one. pace: where connected ranks have saved twice.
    hung: which rank holds the others up, and where, if the agents have found that the training hangs. live: ranks of
    whose shards this node holds no copy, and could make one of what lives in its own ranks."""

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
    """What one rank has recorded: its newest timeline, and its overhead over time."""

    set: str
    rank: Count
    timeline: TimelineState | None
    series: tuple[Point, ...]


class InspectPart(Message, frozen=True, tag="inspect"):
    """One agent's part of the picture. unprotected: why its recovery round is not over, when that takes long.
    kept_until: Unix time at which a detached agent frees what it holds, 0.0: it does not. spares: that the job was
    submitted with; without: nodes that it has lost and goes on without. after: the job from which this one goes on;
    taken: the versions of it that were taken over, by set, under its own stamps; not_taken: why they are not all.
    parity: blocks of it in a row of a group of `replicas` nodes; 0: whole copies. domains: which groups of nodes
    share a failure domain; None
    where none is known."""

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
    taken: tuple[tuple[SetName, Stamp], ...] = ()
    not_taken: str = ""
    parity: Blocks = 0
    domains: Separation | None = None


class JobAsk(Message, frozen=True, tag="job?"):
    """User -> controller: the picture of this job."""

    job: Job


class JobRow(msgspec.Struct, frozen=True):
    """One job in a list. slurm: its state; nodes, restarts: of its newest incarnation; recoveries: completed ones;
    ended: Unix time, 0 while it lives; sealed: the newest sealed version that its log knows of, 0: none."""

    job: Job
    uid: int
    slurm: str
    nodes: Count
    restarts: Restart
    recoveries: Count
    ended: Time = 0.0
    sealed: Version = 0


class JobsAsk(Message, frozen=True, tag="jobs?"):
    """User -> controller: the jobs that I may see; all: also those that ended more than a day ago."""

    all: bool = False


class JobsAnswer(Message, frozen=True, tag="jobs"):
    """Controller -> user: the newest jobs, and how many more there are."""

    jobs: tuple[JobRow, ...] = ()
    more: int = 0
    error: str = ""


class LemonRow(msgspec.Struct, frozen=True):
    """A node of the job that did harm before, to whatever job. last: Unix time; what: of each time, the oldest
    first."""

    host: str
    count: Count
    last: Time
    what: tuple[str, ...]


class JobAnswer(Message, frozen=True, tag="job"):
    """Controller -> user: parts of the agents that answered, the event log, what Slurm says, nodes that did harm
    before; or a refusal."""

    parts: tuple[InspectPart, ...] = ()
    events: tuple[EventRecord, ...] = ()
    slurm: dict[str, str] = msgspec.field(default_factory=dict)
    missing: tuple[str, ...] = ()
    error: str = ""
    lemons: tuple[LemonRow, ...] = ()
