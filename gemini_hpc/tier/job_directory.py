"""Find and make a job's directory below a tier: `gemini-JOBID`, or `gemini-JOBID-KEY` beside another job's.

Job numbers can repeat: two clusters may share a file system, and a controller may restart its numbering. Each
submission therefore has a random key, which the job keeps across requeues. The file `.job.json` in the
directory holds the key.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from gemini_hpc.core.numbers import ClusterName, Job, JobKey
from gemini_hpc.tier import scratch
from gemini_hpc.tier.owned import Directory, NotOurs
from gemini_hpc.wire.bounds import Strict

MARK = ".job.json"
_MOST_BYTES = 4096
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EPERM, errno.EACCES)


class Mark(msgspec.Struct, frozen=True):
    """The identity of the job that owns a directory.

    Attributes:
        job: The job number.
        key: The random key of the submission, "" if it has none.
        cluster: Slurm's ClusterName, "" if unknown.
    """

    job: Job
    key: JobKey = ""
    cluster: ClusterName = ""


_decoder = Strict(msgspec.json.Decoder(Mark))


def format_plain_name(job: int) -> str:
    """Return a job's directory name without a key, used unless another job of this number has it."""
    return f"gemini-{job}"


def list_names(tier: str, job: int) -> list[str]:
    """Return the sorted names of the directories that jobs of this number have. Raises OSError."""
    wanted = re.compile(rf"{format_plain_name(job)}(-[0-9a-f]{{16}})?")
    return sorted(name for name in os.listdir(tier) if wanted.fullmatch(name))


def find(tier: Directory, mark: Mark) -> Directory | None:
    """Return the directory of exactly this job, None if it has none yet. Raises OSError."""
    plain = format_plain_name(mark.job)
    for name in [f"{plain}-{mark.key}", plain] if mark.key else [plain]:
        found = _open_marked(tier, name, mark.job)
        if found is not None and found[1].key == mark.key:
            return found[0]
        if found is not None:
            found[0].close()
    return None


def explain_clash(tier: Directory, mark: Mark) -> str:
    """Return one sentence if another job has this job's plain directory name, else "". Raises OSError."""
    plain = format_plain_name(mark.job)
    found = find(tier, mark)
    name = os.path.basename(found.where) if found is not None else ""
    if found is not None:
        found.close()
    if name == plain or (not name and not os.path.lexists(f"{tier.path}/{plain}")):
        return ""
    if not mark.key:
        return f"{tier.where}/{plain} is another job's: nothing of this job is saved; give it another tier"
    return f"{tier.where}/{plain} is another job's: this job's versions are in {plain}-{mark.key} there"


def open_former(tier: Directory, job: int, cluster: str) -> Iterator[Directory]:
    """Yield the directories that this user's jobs of this number have had on this cluster.

    Each directory stays open until the next one is requested. Raises OSError.
    """
    for name in list_names(tier.path, job):
        found = _open_marked(tier, name, job)
        if found is not None:
            with found[0]:
                if found[1].cluster in ("", cluster):
                    yield found[0]


def make(tier: Directory, mark: Mark) -> Directory:
    """Return the directory of this job; make it if it does not exist.

    Raises:
        NotOurs: Other jobs have its names.
        OSError: The directory cannot be made.
    """
    if (existing := find(tier, mark)) is not None:
        return existing
    plain = format_plain_name(mark.job)
    made = scratch.make(tier.path, plain)
    try:
        _write(made, mark)
        for name in [plain, f"{plain}-{mark.key}"] if mark.key else [plain]:
            try:
                os.rename(made, f"{tier.path}/{name}")
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                if (existing := find(tier, mark)) is not None:  # another node has made it meanwhile
                    return existing
                continue
            with suppress(PermissionError):  # a tier may permit making directories but not listing them
                sync(tier.path)
            return tier.open_below(name)
    finally:
        scratch.remove(made, ignore_errors=True)
    raise NotOurs(f"{tier.where}/{plain}", f"{plain} is another job's")


def clean(tier: Directory, job: int) -> None:
    """Remove directories of this job that never got their final name, as far as the tier can be listed."""
    begun = re.compile(rf"\.{format_plain_name(job)}\..{{1,40}}\.tmp")
    with suppress(OSError):
        for name in filter(begun.fullmatch, os.listdir(tier.path)):
            with suppress(OSError), tier.open_below(name):
                scratch.remove(f"{tier.path}/{name}")


def sync(path: str) -> None:
    """Sync a file, or a directory so that renames in it survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_marked(tier: Directory, name: str, job: int) -> tuple[Directory, Mark] | None:
    """Return the named directory with its mark, None if absent or not this job's and user's. Raises OSError."""
    try:
        found = tier.open_below(name)
    except (FileNotFoundError, NotOurs):
        return None
    mark = None
    try:
        mark = _read(found, job)
    finally:
        if mark is None:
            found.close()
    return None if mark is None else (found, mark)


def _read(directory: Directory, job: int) -> Mark | None:
    """Return the mark in a directory, None if it is another job's or invalid.

    A directory without a mark belongs to a job without a key.
    """
    try:
        with os.fdopen(directory.open_file(MARK), "rb") as file:
            found = _decoder.decode(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return Mark(job)
    except (msgspec.MsgspecError, NotOurs):
        return None
    return found if found.job == job else None


def _write(directory: str, mark: Mark) -> None:
    fd = os.open(f"{directory}/{MARK}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(mark))
        file.flush()
        os.fsync(fd)
    sync(directory)
