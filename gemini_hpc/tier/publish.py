"""Publication of files on the tier by write, sync and rename, with one sentence for each failure."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gemini_hpc import clock
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import job_directory, scratch, version
from gemini_hpc.tier.job_directory import Mark
from gemini_hpc.tier.owned import Directory, NotOurs, as_users_know

_MODE = 0o700
_HDF5 = re.compile(r"errno = ([0-9]{1,3})\b")  # in HDF5's message when a file cannot be closed
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
    """A failure on the tier; its text is one sentence for the user."""


def explain_error(error: Exception) -> str:
    """Return an error's reason in words, also for the RuntimeError that HDF5 raises in place of an OSError."""
    if isinstance(error, NotOurs):
        return str(error.strerror)
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        code = error.errno or 0
    else:
        text, found = str(error), _HDF5.search(str(error))
        code = int(found[1]) if found else 0
        text = os.strerror(code) if found else text
    return _REASONS.get(code, (text.splitlines() or [""])[0][:200])


@contextmanager
def as_tier_error(action: str) -> Iterator[None]:
    """Convert an OSError, or HDF5's RuntimeError, into a TierError about `action`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise TierError(as_users_know(f"{action}: {explain_error(error)}")) from None


@contextmanager
def make_version(
    tier: str, mark: Mark, training_name: str, stamp: Stamp, lay_out: Callable[[str], object] = lambda path: None
) -> Iterator[Directory]:
    """Yield a version's directory; make it and its parents if missing, but never the tier itself.

    If the tier has vanished (a file system is not mounted), nothing is written in its place. New parent
    directories are synced here. The version itself is synced when it becomes whole.

    Args:
        tier: The tier's directory.
        mark: The mark of the job.
        training_name: The training's name.
        stamp: The version's stamp.
        lay_out: Called with the path of a new directory before anything is written there.

    Raises:
        TierError: The directory cannot be made, or another user owns it.
    """
    with as_tier_error(tier), Directory.open_tier(tier) as top, job_directory.make(top, mark) as job:
        with suppress(FileExistsError):
            os.mkdir(f"{job.path}/{training_name}", _MODE)
            job_directory.sync(job.path)
        with job.open_below(training_name) as above:
            name = version.format_name(stamp)
            if not os.path.lexists(f"{above.path}/{name}"):
                made = scratch.make(above.path, name)
                try:
                    # a visible path, since external programs lack the descriptor
                    lay_out(f"{above.where}/{os.path.basename(made)}")
                    os.rename(made, f"{above.path}/{name}")  # replaces another node's empty directory, too
                except OSError as error:
                    with suppress(OSError):
                        os.rmdir(made)
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
            found = above.open_below(name)
    with found:
        yield found


@contextmanager
def replace_file(directory: str, name: str) -> Iterator[str]:
    """Yield a temporary path to write to, and publish it as `name` if the block succeeds.

    If the block fails, the temporary file is removed.
    """
    temporary = f"{directory}/.{name}.{os.getpid()}.tmp"
    try:
        yield temporary
        publish(temporary, directory, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def publish(temporary: str, directory: str, name: str) -> None:
    """Sync a temporary file and rename it to its final name in this directory. Raises OSError."""
    job_directory.sync(temporary)
    os.rename(temporary, f"{directory}/{name}")
    job_directory.sync(directory)


def remove(directory: str) -> None:
    """Remove a version in one step, by a rename that makes it no version even if a node still writes there.

    Raises OSError.
    """
    above, name = os.path.split(directory)
    gone = f"{above}/.{name}.{os.urandom(6).hex()}.tmp"
    with suppress(FileNotFoundError):
        os.rename(directory, gone)
        job_directory.sync(above)
        scratch.remove(gone)


class WritePace:
    """A limiter that holds a stream of bytes to a rate; a rate of 0 bytes per second means no limit."""

    _STEP_S = 0.25  # the longest pause that is made up for

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._due = clock.monotonic()

    def __call__(self, count: int) -> None:
        """Record that `count` more bytes have been handled, and sleep if they are ahead of the rate."""
        if not self._rate:
            return
        now = clock.monotonic()
        self._due = max(self._due, now - self._STEP_S) + count / self._rate
        if self._due > now:
            clock.sleep(self._due - now)
