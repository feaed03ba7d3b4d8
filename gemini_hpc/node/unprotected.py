"""The reasons why jobs are not protected on this node, kept where user and administrator find them.

slurmd discards the output of a successful prolog. So root leaves one line for each such job in a directory of its
own beside the run directory. The SPANK plugin prints the line in the job's output, and the file `log` collects all
lines. The prolog's shell script writes the same way.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.lines import replace_unprintable

DIRECTORY_SUFFIX = ".unprotected"
ELSEWHERE = "elsewhere: "  # prefix of a reason on other nodes: the plugin then does not blame this node
LOG = "log"
MAX_CHARS = 240
MAX_LOG_BYTES = 256 << 10
KEPT_S = 86400.0  # older lines are of jobs without an epilog
_MAX_ENTRIES = 4096
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UnprotectedNote:
    """The line of one incarnation. Only `write_reason` works after a fork as another user; all else requires root."""

    def __init__(self, run_dir: str, job: int, restart: int) -> None:
        """Discard the line of an earlier incarnation and open a draft.

        Raise nothing: without a file, no line is kept.
        """
        self._job, self._restart = job, restart
        self._dir = self._file = -1
        with suppress(OSError):
            path = run_dir.rstrip("/") + DIRECTORY_SUFFIX
            with suppress(FileExistsError):
                os.mkdir(path, 0o755)
            self._dir = _open_directory(path)
            self._sweep()
            for name in (self._draft, str(job)):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._dir)
            self._file = os.open(self._draft, _NEW, 0o644, dir_fd=self._dir)

    @property
    def fds(self) -> list[int]:
        """Return the descriptors that `write_reason` needs after a fork."""
        return [self._file] if self._file >= 0 else []

    @property
    def _draft(self) -> str:
        return f".{self._job}"

    def write_reason(self, why: str) -> None:
        """Write the reason to the draft. The first reason counts."""
        shown = replace_unprintable(" ".join(why.split())[:MAX_CHARS]).encode("ascii", "replace")
        with suppress(OSError):
            if self._file >= 0 and os.fstat(self._file).st_size == 0:
                os.write(self._file, b"%d %s\n" % (self._restart, shown))

    def publish(self) -> None:
        """Publish the draft where the plugin finds it, and append it to the log."""
        with suppress(OSError):
            if self._file < 0:
                return
            line = os.pread(self._file, MAX_CHARS + 16, 0)
            if line:
                os.fchmod(self._file, 0o644)
                os.rename(self._draft, str(self._job), src_dir_fd=self._dir, dst_dir_fd=self._dir)
                self._append_to_log(line)
            else:
                os.unlink(self._draft, dir_fd=self._dir)
        for fd in (self._file, self._dir):
            with suppress(OSError):
                os.close(fd)
        self._dir = self._file = -1

    def _append_to_log(self, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(LOG, flags, 0o644, dir_fd=self._dir)
        try:
            if os.fstat(fd).st_size > MAX_LOG_BYTES:
                os.ftruncate(fd, 0)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
            text = line.decode("ascii", "replace").partition(" ")[2].strip()
            os.write(fd, f"{stamp} job={self._job} restart={self._restart} {text}\n".encode())
        finally:
            os.close(fd)

    def _sweep(self) -> None:
        """Remove the old lines of jobs without an epilog."""
        old = clock.time() - KEPT_S
        with os.scandir(self._dir) as entries:
            for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False):
                with suppress(FileNotFoundError):  # another prolog's sweep was faster
                    if entry.name != LOG and entry.stat(follow_symlinks=False).st_mtime < old:
                        os.unlink(entry.name, dir_fd=self._dir)


def _open_directory(path: str) -> int:
    fd = os.open(path, _DIRECTORY)
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise PermissionError(f"{path} is not root's alone")
    return fd
