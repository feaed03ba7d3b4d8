"""Messages between an agent and the worker process that reads and writes the agent's files on the tier.

Messages are JSON, one a line. The worker reads orders from its standard input and writes answers to its
standard output.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import TRAINING_NAME, Bytes, ClusterName, Count, Job, JobKey, TrainingName, Version
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.job_directory import Mark
from gemini_hpc.tier.names import Names
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.stored import Digest, NodeFile, Rejection

Tier = Annotated[str, msgspec.Meta(pattern=r"\A/[^\x00]{0,4095}\Z")]
TrainingOrAll = Annotated[str, msgspec.Meta(pattern=rf"\A({TRAINING_NAME.pattern})?\Z")]
LFS = "/usr/bin/lfs"
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Whose(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of the job beside its number.

    A key of None means any job of this user that had the number on this cluster.
    """

    key: JobKey | None = ""
    cluster: ClusterName = ""


class Order(_Whose, frozen=True, tag_field="op"):
    """Base of all orders to the worker.

    `tier` is the directory that the user has named. A `set` of "" means all trainings of the job.
    """

    tier: Tier
    job: Job
    training: TrainingOrAll

    @property
    def mark(self) -> Mark:
        """Return the mark of the job's directory."""
        return Mark(self.job, self.key or "", self.cluster)


class Source(msgspec.Struct, frozen=True):
    """A complete slot, passed by file descriptor.

    Attributes:
        fd: The open descriptor.
        rank: The shard's rank.
        home: Node rank of the shard's home.
        bytes: The slot's size.
        used: Number of bytes in use, from the slot's start.
        digest: Digest of the used bytes.
    """

    fd: int
    rank: Count
    home: Count
    bytes: Bytes
    used: Bytes
    digest: Digest


class Write(Order, frozen=True, tag="write"):
    """An order to write this node's file of a version; the slots are not changed.

    `lfs` is the program that sets file layouts on Lustre. The worker answers with `Progress`, then `Written`.
    """

    stamp: Stamp
    node_rank: Count
    shards: tuple[Source, ...]
    bytes_per_s: Rate = 0.0
    compress: bool = False
    lfs: str = LFS


class Finish(Order, frozen=True, tag="finish"):
    """An order to complete a version after all nodes have written: index, manifest, then removal of old versions.

    `names` are names for the version, each with the version number that was asked for. The worker answers
    with `Progress`, then `Finished`.
    """

    stamp: Stamp
    world: Count
    files: tuple[NodeFile, ...]
    keep_last: Annotated[int, msgspec.Meta(ge=1)] = 2
    keep_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    names: Names = msgspec.field(default_factory=dict)


class Name(Order, frozen=True, tag="name"):
    """An order to keep a whole version permanently, under these names; answered by `Finished`."""

    stamp: Stamp
    names: Names


class Clean(Order, frozen=True, tag="clean"):
    """An order to remove unfinished versions older than `before`; answered by `Finished`.

    The sender ensures that no node is writing there.
    """

    before: Stamp | None = None


class Look(Order, frozen=True, tag="look"):
    """An order to find the newest whole version of each training; answered by `Found`.

    Attributes:
        without: Training and stamp of versions to ignore.
        begin: A job begins; the worker also checks that files could be written at all.
        make: Make the tier's directory if it is missing and its parent exists.
        rejected: Versions to ignore. The worker marks them on the tier, for readers that do not know of the
            rejection.
    """

    without: tuple[tuple[str, Stamp], ...] = ()
    begin: bool = False
    make: bool = False
    rejected: tuple[Rejection, ...] = ()


class Read(Order, frozen=True, tag="read"):
    """An order to read a shard of a version into a descriptor; answered by `Progress`, then `Finished`."""

    stamp: Stamp
    rank: Count
    fd: int
    used: Bytes
    digest: Digest


class Answer(msgspec.Struct, frozen=True, tag_field="op"):
    """Base of all answers of the worker."""


class Progress(Answer, frozen=True, tag="progress"):
    """The number of bytes handled so far; also sent as a sign of life when it has not grown."""

    bytes: Bytes


class Written(Answer, frozen=True, tag="written"):
    """The answer that a node's file is on the tier, synced."""

    file: NodeFile


class Finished(Answer, frozen=True, tag="finished"):
    """The answer that an order is complete.

    Attributes:
        removed: Stamps of the removed versions.
        trouble: One sentence if old versions could not be removed, else "".
        names: For each requested name, the version number asked for when it was given, and the version that
            has it.
        directory: The job's directory, "" in answers to `Clean` and `Read`.
    """

    removed: tuple[Stamp, ...] = ()
    trouble: str = ""
    names: dict[TrainingName, tuple[Version, Stamp]] = msgspec.field(default_factory=dict)
    directory: str = ""


class Found(Answer, frozen=True, tag="found"):
    """The newest whole version of each training that has one.

    Attributes:
        manifests: The manifests of these versions.
        directory: The job's directory, "" if it has none yet.
        beside: One sentence if the directory's name is not the job's number alone, else "".
    """

    manifests: tuple[VersionManifest, ...] = ()
    directory: str = ""
    beside: str = ""


class Failed(Answer, frozen=True, tag="failed"):
    """The answer that an order has failed; `reason` is one sentence."""

    reason: str


order_decoder: Strict[Write | Finish | Name | Clean | Look | Read] = Strict(
    msgspec.json.Decoder(Write | Finish | Name | Clean | Look | Read)
)
answer_decoder: Strict[Progress | Written | Finished | Found | Failed] = Strict(
    msgspec.json.Decoder(Progress | Written | Finished | Found | Failed)
)
encode = msgspec.json.Encoder().encode
