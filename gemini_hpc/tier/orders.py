"""What an agent asks of the process that reads and writes its files on the tier, and what that answers: JSON, one
message a line, orders on its standard input and answers on its standard output."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import SET_NAME, Bytes, ClusterName, Count, Job, JobKey, SetName, Version
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.job_directory import Mark
from gemini_hpc.tier.names import Names
from gemini_hpc.tier.version import Manifest
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.stored import Digest, NodeFile, Rejection

Tier = Annotated[str, msgspec.Meta(pattern=r"\A/[^\x00]{0,4095}\Z")]
SetOrAll = Annotated[str, msgspec.Meta(pattern=rf"\A({SET_NAME.pattern})?\Z")]
LFS = "/usr/bin/lfs"
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Whose(msgspec.Struct, frozen=True, kw_only=True):
    """The job, beside its number. key: None means any job of this user that had the number on this cluster."""

    key: JobKey | None = ""
    cluster: ClusterName = ""


class Order(_Whose, frozen=True, tag_field="op"):
    """Base of all orders. tier: the directory that the user has named; set: "" for all of the job's sets."""

    tier: Tier
    job: Job
    set: SetOrAll

    @property
    def mark(self) -> Mark:
        """The mark of the job's directory."""
        return Mark(self.job, self.key or "", self.cluster)


class Source(msgspec.Struct, frozen=True):
    """A complete slot: open descriptor, its size and its home's node rank, and the digest of its `used` bytes."""

    fd: int
    rank: Count
    home: Count
    bytes: Bytes
    used: Bytes
    digest: Digest


class Write(Order, frozen=True, tag="write"):
    """Write this node's file of a version. The slots stay as they are.
    lfs: the program that lays files out on Lustre. Answered by `Progress`, then `Written`."""

    stamp: Stamp
    node_rank: Count
    shards: tuple[Source, ...]
    bytes_per_s: Rate = 0.0
    compress: bool = False
    lfs: str = LFS


class Finish(Order, frozen=True, tag="finish"):
    """All nodes have written: index, manifest, then what is old goes. names: those that the version is to have, each
    with the number that was asked for. Answered by `Progress`, then `Finished`."""

    stamp: Stamp
    world: Count
    files: tuple[NodeFile, ...]
    keep_last: Annotated[int, msgspec.Meta(ge=1)] = 2
    keep_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    names: Names = msgspec.field(default_factory=dict)


class Name(Order, frozen=True, tag="name"):
    """A version that is whole stays for good, under these names. Answered by `Finished`."""

    stamp: Stamp
    names: Names


class Clean(Order, frozen=True, tag="clean"):
    """Remove what was begun and has not become whole, older than `before`; nobody may be writing there. Answered by
    `Finished`."""

    before: Stamp | None = None


class Look(Order, frozen=True, tag="look"):
    """Which whole version of each set is the newest, but for these, and for rejected ones? begin: a job begins, so it
    is looked whether files could be written at all; make: the tier's directory is made where it is not there, in one
    that is; rejected: such versions are marked, for who looks without knowing. Answered by `Found`."""

    without: tuple[tuple[str, Stamp], ...] = ()
    begin: bool = False
    make: bool = False
    rejected: tuple[Rejection, ...] = ()


class Read(Order, frozen=True, tag="read"):
    """Read a shard of a version into this descriptor. Answered by `Progress`, then `Finished`."""

    stamp: Stamp
    rank: Count
    fd: int
    used: Bytes
    digest: Digest


class Answer(msgspec.Struct, frozen=True, tag_field="op"):
    """Base of all answers."""


class Progress(Answer, frozen=True, tag="progress"):
    """So many bytes are through; a sign of life also where that is none."""

    bytes: Bytes


class Written(Answer, frozen=True, tag="written"):
    """The file is on the tier, synced."""

    file: NodeFile


class Finished(Answer, frozen=True, tag="finished"):
    """Done; removed: versions that went; trouble: why others that should have gone did not, one sentence; names: for
    each that was to be given, the number that was asked for when it was given, and the version that has it;
    directory: the job's, "" of `Clean` and `Read`."""

    removed: tuple[Stamp, ...] = ()
    trouble: str = ""
    names: dict[SetName, tuple[Version, Stamp]] = msgspec.field(default_factory=dict)
    directory: str = ""


class Found(Answer, frozen=True, tag="found"):
    """The newest whole version of each set that has one. directory: the job's, "" where it has none yet; beside: why
    its name is not the job's number alone, one sentence."""

    manifests: tuple[Manifest, ...] = ()
    directory: str = ""
    beside: str = ""


class Failed(Answer, frozen=True, tag="failed"):
    """It did not work; one sentence."""

    reason: str


order_decoder: Strict[Write | Finish | Name | Clean | Look | Read] = Strict(
    msgspec.json.Decoder(Write | Finish | Name | Clean | Look | Read)
)
answer_decoder: Strict[Progress | Written | Finished | Found | Failed] = Strict(
    msgspec.json.Decoder(Progress | Written | Finished | Found | Failed)
)
encode = msgspec.json.Encoder().encode
