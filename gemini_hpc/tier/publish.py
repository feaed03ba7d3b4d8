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
from gemini_hpc.tier import version

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
        raise TierError(f"{what}: {why(error)}") from None


def version_directory(tier: str, job: int, set_name: str, stamp: Stamp) -> str:
    """Path of a version."""
    return f"{version.job_directory(tier, job)}/{set_name}/{version.name(stamp)}"


def make_directory(
    tier: str, job: int, set_name: str, stamp: Stamp, lay_out: Callable[[str], object] = lambda path: None
) -> str:
    """The version's directory, made as far as it is not there; the tier itself never is: where it has vanished (a
    file system that is not mounted) nothing is to be written in its place. What is above it is synced where it is
    new; it is itself when the version becomes whole. `lay_out` is called with the path of a new one before anybody
    writes there. Raises TierError."""
    path = tier
    with told(tier):
        os.stat(f"{tier}/.")
        for part in (f"gemini-{job}", set_name):
            above, path = path, f"{path}/{part}"
            with suppress(FileExistsError):
                os.mkdir(path, _MODE)
                with suppress(PermissionError):  # in a tier where one may make directories and not look
                    sync_directory(above)
        name = version.name(stamp)
        whole = f"{path}/{name}"
        if not os.path.lexists(whole):
            made = tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=path)
            try:
                lay_out(made)
                os.rename(made, whole)  # also in the place of an empty one, which another node has just made
            except OSError as error:
                with suppress(OSError):
                    os.rmdir(made)
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
    return whole


def sync_directory(path: str) -> None:
    """What was renamed in it is there after a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
    sync_directory(directory)


def remove(directory: str) -> None:
    """A version, in one step: under another name it is none, whoever is writing there. Raises OSError."""
    above, name = os.path.split(directory)
    gone = f"{above}/.{name}.{os.urandom(6).hex()}.tmp"
    with suppress(FileNotFoundError):
        os.rename(directory, gone)
        sync_directory(above)
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
