"""Versions on the tier: their directories, and the manifest that makes one whole.

    DIR/gemini-JOBID/SET/e000003-v000000001200/        (`job_directory`)
        node-0000.h5, node-0001.h5, ...   the shards of the ranks that lived on that node
        index.h5                          each tensor of the training as one (virtual) dataset
        manifest.json                     written last: without it there is no version
        kept                              in a version that retention does not remove; its names (`names`)
        rejected                          in one that a training has found bad; why

Names sort as stamps do. Nothing here needs h5py: an agent that looks for a version reads small JSON files only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import MAX_RANKS, SET_NAME, ClusterName, Job, JobKey, SetName, Time
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.owned import Directory, NotOurs
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.stored import NodeFile, Stored

FORMAT = 2  # 1: shards had a plain xxh3_128
MANIFEST, INDEX, KEPT, REJECTED = "manifest.json", "index.h5", "kept", "rejected"
MAX_MANIFEST_BYTES = 256 << 20
_DIRECTORY = re.compile(r"e([0-9]{7})-v([0-9]{13})")


class Manifest(msgspec.Struct, frozen=True):
    """What a whole version is made of. time: Unix time of its end; serial: how many this job had written then; key,
    cluster: of the job, as in its directory's mark."""

    job: Job
    set: SetName
    stamp: Stamp
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    time: Time
    files: tuple[NodeFile, ...]
    serial: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)] = 1
    format: int = FORMAT
    key: JobKey = ""
    cluster: ClusterName = ""

    def shards(self) -> dict[int, tuple[str, Stored]]:
        """File name and shard of each rank."""
        return {shard.rank: (file.name, shard) for file in self.files for shard in file.shards}

    def shard(self, rank: int) -> tuple[str, Stored | None, int]:
        """File name and shard of one rank, and about where in the file that begins: shards stand one after the
        other."""
        for file in self.files:
            begin = 0
            for shard in file.shards:
                if shard.rank == rank:
                    return file.name, shard, begin
                begin += shard.used
        return "", None, 0

    @property
    def whole(self) -> bool:
        """Whether each rank has exactly one shard."""
        ranks = [shard.rank for file in self.files for shard in file.shards]
        return len(ranks) == self.world and set(ranks) == set(range(self.world))


_decoder = Strict(msgspec.json.Decoder(Manifest))


def pack(manifest: Manifest) -> bytes:
    """As it is written. Raises ValueError for one that `parse` would refuse."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    parse(data)
    return data


def parse(data: bytes) -> Manifest:
    """The manifest in `data`. Raises ValueError with what is wrong."""
    try:
        manifest = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{MANIFEST}: {error}") from None
    if manifest.format != FORMAT:
        raise ValueError(f"{MANIFEST}: format {manifest.format} found, {FORMAT} wanted")
    if not manifest.whole:
        raise ValueError(f"{MANIFEST}: not one shard for each of {manifest.world} ranks")
    return manifest


def name(stamp: Stamp) -> str:
    """Of a version's directory."""
    return f"e{stamp.epoch:07d}-v{stamp.version:013d}"


def stamp_of(directory: str) -> Stamp | None:
    """Inverse of `name`; None for what is none."""
    found = _DIRECTORY.fullmatch(directory)
    return Stamp(int(found[1]), int(found[2])) if found else None


def node_file(node_rank: int) -> str:
    """Name of a node's file."""
    return f"node-{node_rank:04d}.h5"


def stamps(directory: str) -> list[Stamp]:
    """What a set's directory has, newest first, whole or not. Raises OSError; a directory that is not there has
    nothing."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted((found for entry in names if (found := stamp_of(entry)) is not None), reverse=True)


def there(path: str) -> bool:
    """Whether there is such a file. Raises OSError where that cannot be seen: what a file system that fails does not
    show is not gone."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def rejected(directory: str, stamp: Stamp) -> bool:
    """Whether a training has found this version bad: nobody takes it by itself. Raises OSError."""
    return there(f"{directory}/{name(stamp)}/{REJECTED}")


def read(directory: str | Directory, stamp: Stamp) -> Manifest | None:
    """Return the manifest of a version in a set's directory, None where it is not whole.

    Raises:
        ValueError: it is damaged, or of another version.
        NotOurs: of a `Directory`: the version could be another user's.
        OSError: it cannot be read.
    """
    try:
        fd = _open(directory, stamp)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST}: longer than {MAX_MANIFEST_BYTES} bytes")
    manifest = parse(data)
    if manifest.stamp != stamp:
        raise ValueError(f"{MANIFEST}: is of version {manifest.stamp}, found in that of {stamp}")
    return manifest


def _open(directory: str | Directory, stamp: Stamp) -> int:
    if isinstance(directory, str):  # that a user has named: any user's
        return os.open(f"{directory}/{name(stamp)}/{MANIFEST}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with directory.below(name(stamp)) as version:
        return version.file(MANIFEST)


def whole(directory: str | Directory) -> Iterator[Manifest]:
    """Yield the whole versions of a set's directory, newest first.

    Damaged manifests are passed over, and of a `Directory` what could be another user's. Raises OSError.
    """
    for stamp in stamps(directory if isinstance(directory, str) else directory.path):
        with suppress(ValueError, NotOurs):
            manifest = read(directory, stamp)
            if manifest is not None:
                yield manifest


def sets(job_directory: str) -> list[str]:
    """Return the names of the sets in a job's directory. Raises OSError."""
    try:
        names = os.listdir(job_directory)
    except FileNotFoundError:
        return []
    return sorted(entry for entry in names if SET_NAME.fullmatch(entry))
