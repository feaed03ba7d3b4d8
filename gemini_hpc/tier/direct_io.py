"""A file's bytes past the page cache, where its file system can do that.

Pages of the cache cost more of the processor than the disk's own transfer does, and drive out what a training reads
again and again. What is not on pages (offset and length), and all of a file system that has no such reads and writes,
goes through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress

PAGE_BYTES = 4096
PART_BYTES = 2 << 20


def buffers(count: int) -> list[memoryview]:
    """Of `PART_BYTES` each, on pages."""
    memory = mmap.mmap(-1, count * PART_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    return [view[at : at + PART_BYTES] for at in range(0, len(view), PART_BYTES)]


def started(count: int, run: Callable[[], None], name: str) -> list[threading.Thread]:
    """Threads that do not hold up the process's end; fewer where no more are to be had. Raises RuntimeError where
    none is."""
    threads: list[threading.Thread] = []
    for _ in range(count):
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not threads:
                raise
            break
        threads.append(thread)
    return threads


class File:
    """An open file. Raises OSError."""

    def __init__(self, path: str, flags: int, *, direct: bool = True) -> None:
        self.fd = os.open(path, flags | os.O_CLOEXEC)
        self._direct = -1
        if direct:
            with suppress(OSError):
                self._direct = os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT)

    def close(self) -> None:
        """No call is under way, and none comes."""
        for fd in (self._direct, self.fd):
            if fd != -1:
                os.close(fd)

    def read(self, into: memoryview, at: int) -> int:
        """How many bytes from offset `at` are there now; 0 at the file's end."""
        if self._may(into, at):
            try:
                return os.preadv(self._direct, [into], at)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.preadv(self.fd, [into], at)

    def write(self, data: memoryview, at: int) -> None:
        """All of it, to offset `at`. Raises OSError: EINVAL where the file system has no such writes after all, as
        the two ways are not mixed then."""
        may = self._may(data, at)
        fd = self._direct if may else self.fd
        while len(data):
            sent = os.pwrite(fd, data, at)
            if not sent:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if not may and sent >= PAGE_BYTES:
                # It goes to the disk while the next bytes come, and does not stay in the page cache.
                os.posix_fadvise(fd, at, sent, os.POSIX_FADV_DONTNEED)
            data, at = data[sent:], at + sent

    def _may(self, data: memoryview, at: int) -> bool:
        return self._direct != -1 and at % PAGE_BYTES == 0 == len(data) % PAGE_BYTES
