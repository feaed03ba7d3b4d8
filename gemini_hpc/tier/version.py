"""Versions on the tier: their directories, and the manifest that makes a version whole.

    DIR/gemini-JOBID/SET/e000003-v000000001200/        (`job_directory`)
        node-0000.h5, node-0001.h5, ...   the shards of the ranks that lived on that node
        index.h5                          each tensor of the training as one (virtual) dataset
        manifest.json                     written last: without it there is no version
        kept                              only if retention must not remove the version; its names (`names`)
        rejected                          only if a training has found the version bad; the reason

Directory names sort as stamps do. No function here needs h5py: an agent that searches for a version reads
only small JSON files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import MAX_RANKS, TRAINING_NAME, ClusterName, Job, JobKey, Time, TrainingName
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.owned import Directory, NotOurs
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.stored import NodeFile, Stored

FORMAT = 2  # format 1 had a plain xxh3_128 for each shard
MANIFEST, INDEX, KEPT, REJECTED = "manifest.json", "index.h5", "kept", "rejected"
MAX_MANIFEST_BYTES = 256 << 20
_DIRECTORY = re.compile(r"e([0-9]{7})-v([0-9]{13})")


class VersionManifest(msgspec.Struct, frozen=True):
    """The contents of a whole version.

    `time` is the Unix time of its completion. `serial` is the number of versions that this job had written
    then. `key` and `cluster` are the job's, as in its directory's mark.
    """

    job: Job
    training: TrainingName = msgspec.field(name="set")  # its name in files of format 2
    stamp: Stamp
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    time: Time
    files: tuple[NodeFile, ...]
    serial: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)] = 1
    format: int = FORMAT
    key: JobKey = ""
    cluster: ClusterName = ""

    def map_shards(self) -> dict[int, tuple[str, Stored]]:
        """Return file name and shard of each rank."""
        return {shard.rank: (file.name, shard) for file in self.files for shard in file.shards}

    def find_shard(self, rank: int) -> tuple[str, Stored | None, int]:
        """Return file name, shard and approximate offset in the file of one rank's shard.

        Shards are stored one after the other, so the offset is the sum of the sizes before.
        """
        for file in self.files:
            begin = 0
            for shard in file.shards:
                if shard.rank == rank:
                    return file.name, shard, begin
                begin += shard.used
        return "", None, 0

    @property
    def whole(self) -> bool:
        """Return whether each rank has exactly one shard."""
        ranks = [shard.rank for file in self.files for shard in file.shards]
        return len(ranks) == self.world and set(ranks) == set(range(self.world))


_decoder = Strict(msgspec.json.Decoder(VersionManifest))


def pack(manifest: VersionManifest) -> bytes:
    """Return the manifest as it is written. Raises ValueError for a manifest that `parse` would refuse."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    parse(data)
    return data


def parse(data: bytes) -> VersionManifest:
    """Return the manifest in `data`. Raises ValueError with the reason if it is invalid."""
    try:
        manifest = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{MANIFEST}: {error}") from None
    if manifest.format != FORMAT:
        raise ValueError(f"{MANIFEST}: format {manifest.format} found, {FORMAT} wanted")
    if not manifest.whole:
        raise ValueError(f"{MANIFEST}: not one shard for each of {manifest.world} ranks")
    return manifest


def format_name(stamp: Stamp) -> str:
    """Return the name of a version's directory."""
    return f"e{stamp.epoch:07d}-v{stamp.version:013d}"


def parse_name(directory: str) -> Stamp | None:
    """Return the stamp of a directory name (the inverse of `format_name`), None if it is no version's."""
    found = _DIRECTORY.fullmatch(directory)
    return Stamp(int(found[1]), int(found[2])) if found else None


def format_node_file(node_rank: int) -> str:
    """Return the name of a node's file."""
    return f"node-{node_rank:04d}.h5"


def list_stamps(directory: str) -> list[Stamp]:
    """Return the stamps in a training's directory, newest first, of whole and unfinished versions.

    A missing directory has none. Raises OSError.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted((found for entry in names if (found := parse_name(entry)) is not None), reverse=True)


def is_present(path: str) -> bool:
    """Return whether the file exists.

    Raises OSError if the file system fails, because a file that it does not show is not proven to be gone.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def is_rejected(directory: str, stamp: Stamp) -> bool:
    """Return whether a training has found this version bad. Raises OSError.

    A rejected version is never chosen automatically.
    """
    return is_present(f"{directory}/{format_name(stamp)}/{REJECTED}")


def read(directory: str | Directory, stamp: Stamp) -> VersionManifest | None:
    """Return the manifest of a version in a training's directory, None if the version is not whole.

    Raises:
        ValueError: The manifest is damaged, or of another version.
        NotOurs: For a `Directory` only: the version could be another user's.
        OSError: The manifest cannot be read.
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
    if isinstance(directory, str):  # named by a user, so any owner is accepted
        return os.open(f"{directory}/{format_name(stamp)}/{MANIFEST}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with directory.open_below(format_name(stamp)) as version:
        return version.open_file(MANIFEST)


def list_whole(directory: str | Directory) -> Iterator[VersionManifest]:
    """Yield the manifests of the whole versions in a training's directory, newest first.

    Damaged manifests are skipped. For a `Directory`, versions that could be another user's are skipped too.
    Raises OSError.
    """
    for stamp in list_stamps(directory if isinstance(directory, str) else directory.path):
        with suppress(ValueError, NotOurs):
            manifest = read(directory, stamp)
            if manifest is not None:
                yield manifest


def list_trainings(job_directory: str) -> list[str]:
    """Return the names of the trainings in a job's directory. Raises OSError."""
    try:
        names = os.listdir(job_directory)
    except FileNotFoundError:
        return []
    return sorted(entry for entry in names if TRAINING_NAME.fullmatch(entry))
