"""What a training rank tells of its checkpoints' traffic: the summary, and one iteration as it was recorded.

The same on the local socket (JSON) and between machines (msgpack), as arrays: a field is only ever added at the end,
with a default. Words and sentences in it are the sender's: to be shown, never to be acted on.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import Bytes, Count, Time, Version

# With names of MAX_NAME characters and times to the microsecond, a timeline of these sizes fits a local packet.
MAX_OPS, MAX_CHUNKS, MAX_COPIES, MAX_WAITS, MAX_SPANS = 400, 320, 128, 32, 128
MAX_NAME = 32
MAX_PER_SPAN = 64

MAX_MOMENT_S = 1e5  # a day is the longest iteration that anybody looks at
MAX_DURATION_S = 1e7
MAX_BYTES_PER_S = 1e15
MAX_RATIO = 1e6

Word = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Sentence = Annotated[str, msgspec.Meta(max_length=300)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=MAX_MOMENT_S)]  # seconds from the iteration's start
Duration = Annotated[float, msgspec.Meta(ge=0, le=MAX_DURATION_S)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=MAX_BYTES_PER_S)]
Ratio = Annotated[float, msgspec.Meta(ge=-1, le=MAX_RATIO)]  # noise may make an overhead negative


class TrafficState(msgspec.Struct, frozen=True, array_like=True):
    """One rank's plan and what it achieves. None: not known yet.

    scheme: one of `train.pacer.SCHEMES`; stage: profile, plan, agree, steady. Every j-th version is saved within s
    iterations; a failure repeats `repeated` steps at worst. idle_s: sum of the planned lengths of `spans` spans in an
    iteration of `iteration_s` with `collectives` operations; deviation: normalized, of their lengths. bytes_per_s and
    alpha_s: the link's. Of the total_bytes that one version sends, fitting_bytes have a place in idle spans,
    spilled_bytes go with the last and hold the training up for late_s. overhead: share of the time, as measured;
    waited_s: usual wait at the optimizer; unsealed: versions that were on their way when the training, after its
    longest wait, had to go on. chunks_per_span: of each span in order; neighbours are added up where there are more
    than MAX_PER_SPAN. mu: the share of each span that is planned with. ceiling: the share of the time that may be
    lost; judged_in: iterations until an overhead above it makes versions rarer in any case. sealed_s: from step() to
    seal; reason: why one version in several is saved.
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
    """A chunk that was sent to the holder after the home node's `replica` + 1 places, until it was acknowledged."""

    start_s: Moment
    end_s: Moment
    bytes: Bytes
    replica: Count


class CopyTime(msgspec.Struct, frozen=True, array_like=True):
    """Tensors were copied into the own slot."""

    start_s: Moment
    end_s: Moment
    bytes: Bytes


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """From when until when."""

    start_s: Moment
    end_s: Moment


class TimelineState(msgspec.Struct, frozen=True, array_like=True):
    """One iteration of one rank, from its step() number `version` to the next. gate_s: the optimizer's hook; waits:
    of the training for checkpoints; spans: the idle ones that the plan knows."""

    version: Version
    iteration_s: Moment
    gate_s: Moment
    ops: Annotated[tuple[Operation, ...], msgspec.Meta(max_length=MAX_OPS)] = ()
    chunks: Annotated[tuple[Chunk, ...], msgspec.Meta(max_length=MAX_CHUNKS)] = ()
    copies: Annotated[tuple[CopyTime, ...], msgspec.Meta(max_length=MAX_COPIES)] = ()
    waits: Annotated[tuple[Stretch, ...], msgspec.Meta(max_length=MAX_WAITS)] = ()
    spans: Annotated[tuple[Stretch, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()


class Point(msgspec.Struct, frozen=True, array_like=True):
    """The overhead (share of the time) and the frequency (every j-th version) at a time."""

    t: Time
    overhead: Ratio
    j: Count
