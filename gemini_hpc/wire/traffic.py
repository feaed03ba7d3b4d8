"""A rank's report of its checkpoint traffic: the summary, and one recorded iteration.

The local socket (JSON) and links between machines (msgpack) carry the same structures as arrays. New fields are
therefore only ever added at the end, with a default. Words and sentences come from the sender: show them, but never
act on them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import Bytes, Count, Time, Version

# A timeline of these sizes fits a local packet, with names of MAX_NAME characters and times to the microsecond.
MAX_OPS, MAX_CHUNKS, MAX_COPIES, MAX_WAITS, MAX_SPANS = 400, 320, 128, 32, 128
MAX_NAME = 32
MAX_PER_SPAN = 64

MAX_MOMENT_S = 1e5  # a day is the longest iteration that is of use to anybody
MAX_DURATION_S = 1e7  # four months: longer than a job may run
MAX_BYTES_PER_S = 1e15
MAX_RATIO = 1e6

Word = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Sentence = Annotated[str, msgspec.Meta(max_length=300)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=MAX_MOMENT_S)]  # seconds from the iteration's start
Duration = Annotated[float, msgspec.Meta(ge=0, le=MAX_DURATION_S)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=MAX_BYTES_PER_S)]
Ratio = Annotated[float, msgspec.Meta(ge=-1, le=MAX_RATIO)]  # noise may make an overhead negative


class TrafficState(msgspec.Struct, frozen=True, array_like=True):
    """A rank's traffic plan and its results. None: not known yet.

    Attributes:
        t: Time of the report.
        scheme: `Traffic(scheme=...)`.
        transport: Carrier now: `host`, `nccl`, `gloo` (NCCL was left), `mpi` (no torch) or `none` (no receiver).
        stage: `recall` (of an earlier profile), `profile`, `plan`, `agree` (between ranks) or `steady`; `sizes` and
            `offers` while the ranks deal the state out again.
        problem: Reason why copies do not go in idle spans.
        j: Every j-th version is saved.
        s: Iterations to save a version.
        repeated: Most steps that a failure repeats.
        iteration_s: Length of an iteration.
        idle_s: Planned idle time in an iteration.
        spans: Idle spans in an iteration.
        collectives: Collectives in an iteration.
        deviation: Normalized standard deviation of the spans' lengths.
        bytes_per_s: Rate of the link.
        alpha_s: Time to start a transfer.
        chunks: Chunks of a version in the plan.
        largest_chunk_bytes: Largest chunk.
        total_bytes: Bytes of a version to all holders.
        fitting_bytes: Part that fits into idle spans.
        spilled_bytes: Part that goes with the last span and delays the training.
        late_s: Expected delay.
        overhead: Measured share of the time that checkpoints cost; noise can make it negative.
        waited_s: Usual wait at the optimizer.
        buffer_bytes: Memory that chunks wait in.
        chunks_per_span: Chunks of each span, 64 numbers at most; of more spans neighbours are added up.
        unsealed: Versions not sealed within the training's longest wait (events `late`). A failure right then repeats
            one step more.
        mu: Share of each span that the plan uses; null: an earlier release.
        ceiling: Share of the time that checkpoints may cost (`Traffic(overhead=...)`).
        judged_in: Iterations until an `overhead` above `ceiling` makes saves rarer in any case.
        sealed_s: Usual time from `step()` to the seal.
        reason: Reason why this rank needs j above 1, and what helps.
    """

    t: Time
    scheme: Word
    transport: Word
    stage: Word
    problem: Sentence = ""
    j: Count = 1
    s: Count = 1
    repeated: Count = 1
    iteration_s: Duration | None = None
    idle_s: Duration | None = None
    spans: Count = 0
    collectives: Count = 0
    deviation: Ratio | None = None
    bytes_per_s: Rate | None = None
    alpha_s: Duration | None = None
    chunks: Count = 0
    largest_chunk_bytes: Bytes = 0
    total_bytes: Bytes = 0
    fitting_bytes: Bytes = 0
    spilled_bytes: Bytes = 0
    late_s: Duration = 0.0
    overhead: Ratio | None = None
    waited_s: Duration | None = None
    buffer_bytes: Bytes = 0
    chunks_per_span: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_PER_SPAN)] = ()
    unsealed: Count = 0
    mu: Ratio | None = None
    ceiling: Ratio | None = None
    judged_in: Count = 0
    sealed_s: Duration | None = None
    reason: Sentence = ""


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """A collective of the training."""

    name: Word
    start_s: Moment
    end_s: Moment
    bytes: Bytes


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a copy, from its send until its acknowledgement.

    Attributes:
        replica: The chunk went to the holder `replica` + 1 places after the home node.
    """

    start_s: Moment
    end_s: Moment
    bytes: Bytes
    replica: Count


class CopyTime(msgspec.Struct, frozen=True, array_like=True):
    """A copy of tensors into the rank's own slot."""

    start_s: Moment
    end_s: Moment
    bytes: Bytes


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """A time interval within an iteration."""

    start_s: Moment
    end_s: Moment


class TimelineState(msgspec.Struct, frozen=True, array_like=True):
    """A recorded iteration of one rank, from its step() number `version` to the next.

    Attributes:
        version: Number of the `step()` before it.
        iteration_s: Length of the iteration.
        gate_s: Time at which the training came to the optimizer.
        ops: Collectives, from launch to completion; 400 at most.
        chunks: Chunks, until acknowledged; 320 at most. Replica 0 goes to the first holder after the own node.
        copies: Copies into the own slot; 128 at most.
        waits: Waits for checkpoints at the optimizer; 32 at most.
        spans: Idle spans of the plan; 128 at most.
    """

    version: Version
    iteration_s: Moment
    gate_s: Moment
    ops: Annotated[tuple[Operation, ...], msgspec.Meta(max_length=MAX_OPS)] = ()
    chunks: Annotated[tuple[Chunk, ...], msgspec.Meta(max_length=MAX_CHUNKS)] = ()
    copies: Annotated[tuple[CopyTime, ...], msgspec.Meta(max_length=MAX_COPIES)] = ()
    waits: Annotated[tuple[Stretch, ...], msgspec.Meta(max_length=MAX_WAITS)] = ()
    spans: Annotated[tuple[Stretch, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A sample of the overhead (share of the time) and the frequency (every j-th version) at one time.

    Attributes:
        saved: Newest sealed version at that time; 0: none, or the agent is of an earlier version.
    """

    t: Time
    overhead: Ratio
    j: Count
    saved: Version = 0
