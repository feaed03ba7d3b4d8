"""Files on the tier: made under another name, synced, renamed; and one sentence for each way to fail."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gemini_hpc import clock
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import job_directory, version
from gemini_hpc.tier.job_directory import Mark
from gemini_hpc.tier.owned import Directory, NotOurs, as_users_know

_MODE = 0o700
_HDF5 = re.compile(r"errno = ([0-9]{1,3})\b")  # in what HDF5 says when a file cannot be closed
_REASONS = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the quota is used up",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "the directory is not there",
    errno.ENOTDIR: "not a directory",
    errno.EIO: "input/output error",
    errno.ESTALE: "the file system's server no longer knows the file",
    errno.ENAMETOOLONG: "the name is too long",
}


class TierError(Exception):
    """Something on the tier did not work; one sentence for the user."""


def why(error: Exception) -> str:
    """The reason in words; also of the RuntimeError that HDF5 raises instead of an OSError."""
    if isinstance(error, NotOurs):
        return str(error.strerror)
    if isinstance(error, OSError):
        said = error.strerror or str(error)
        code = error.errno or 0
    else:
        said, found = str(error), _HDF5.search(str(error))
        code = int(found[1]) if found else 0
        said = os.strerror(code) if found else said
    return _REASONS.get(code, (said.splitlines() or [""])[0][:200])


@contextmanager
def told(what: str) -> Iterator[None]:
    """An OSError becomes a TierError about `what`, and what HDF5 raises instead of one."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise TierError(as_users_know(f"{what}: {why(error)}")) from None


@contextmanager
def made_version(
    tier: str, mark: Mark, set_name: str, stamp: Stamp, lay_out: Callable[[str], object] = lambda path: None
) -> Iterator[Directory]:
    """Yield a version's directory, made as far as it is not there, but never the tier itself.

    Where the tier has vanished (a file system that is not mounted) nothing is written in its place. What is above the
    version is synced where it is new; the version itself is when it becomes whole.

    Args:
        lay_out: called with the path of a new directory before anything is written there.

    Raises:
        TierError: it cannot be made, or what is there is another user's.
    """
    with told(tier), Directory.tier(tier) as top, job_directory.make(top, mark) as job:
        with suppress(FileExistsError):
            os.mkdir(f"{job.path}/{set_name}", _MODE)
            job_directory.sync(job.path)
        with job.below(set_name) as above:
            name = version.name(stamp)
            if not os.path.lexists(f"{above.path}/{name}"):
                made = tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=above.path)
                try:
                    lay_out(f"{above.where}/{os.path.basename(made)}")  # for programs that have not the descriptor
                    os.rename(made, f"{above.path}/{name}")  # also in the place of an empty one of another node
                except OSError as error:
                    with suppress(OSError):
                        os.rmdir(made)
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
            found = above.below(name)
    with found:
        yield found


@contextmanager
def replaced(directory: str, name: str) -> Iterator[str]:
    """A path to write to; the file has its name when this block has ended well, and is not there otherwise."""
    temporary = f"{directory}/.{name}.{os.getpid()}.tmp"
    try:
        yield temporary
        publish(temporary, directory, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def publish(temporary: str, directory: str, name: str) -> None:
    """A file in this directory gets its name when all of it is on disk. Raises OSError."""
    fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, f"{directory}/{name}")
    job_directory.sync(directory)


def remove(directory: str) -> None:
    """A version, in one step: under another name it is none, whoever is writing there. Raises OSError."""
    above, name = os.path.split(directory)
    gone = f"{above}/.{name}.{os.urandom(6).hex()}.tmp"
    with suppress(FileNotFoundError):
        os.rename(directory, gone)
        job_directory.sync(above)
        shutil.rmtree(gone)


class Pace:
    """Holds a stream of bytes to a rate. bytes_per_s 0: as fast as it goes."""

    _STEP_S = 0.25  # at most so much is made good after a pause

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._due = clock.monotonic()

    def __call__(self, count: int) -> None:
        """`count` more bytes are through."""
        if not self._rate:
            return
        now = clock.monotonic()
        self._due = max(self._due, now - self._STEP_S) + count / self._rate
        if self._due > now:
            clock.sleep(self._due - now)
