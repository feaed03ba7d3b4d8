"""File input and output past the page cache (`O_DIRECT`), on file systems that support it.

Copying through the page cache costs more processor time than the disk transfer itself. It also evicts data
that the training reads repeatedly. The page cache is used for bytes that are not page-aligned in offset and
length. It is used for all bytes on a file system without direct input and output.
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


def allocate_buffers(count: int) -> list[memoryview]:
    """Return `count` page-aligned buffers of `PART_BYTES` each."""
    memory = mmap.mmap(-1, count * PART_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    return [view[at : at + PART_BYTES] for at in range(0, len(view), PART_BYTES)]


def start_threads(count: int, run: Callable[[], None], name: str) -> list[threading.Thread]:
    """Start up to `count` daemon threads that run `run`, and return them.

    Daemon threads do not hold up the end of the process. Fewer threads are returned if the system refuses to
    start more. Raises RuntimeError if not even one thread can be started.
    """
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
    """A file opened for both buffered and direct input and output.

    Creating an instance raises OSError if the file cannot be opened.
    """

    def __init__(self, path: str, flags: int, *, direct: bool = True) -> None:
        self.fd = os.open(path, flags | os.O_CLOEXEC)
        self._direct = -1
        if direct:
            with suppress(OSError):
                self._direct = os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT)

    def close(self) -> None:
        """Close the file. The caller ensures that no other call is running or follows."""
        for fd in (self._direct, self.fd):
            if fd != -1:
                os.close(fd)

    def read(self, into: memoryview, offset: int) -> int:
        """Read bytes at offset `offset` into `into`; return their number, 0 at the end of the file."""
        if self._can_use_direct_io(into, offset):
            try:
                return os.preadv(self._direct, [into], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.preadv(self.fd, [into], offset)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at offset `offset`.

        Raises OSError. EINVAL means that the file system does not support direct writes after all. No
        fallback happens here, because direct and buffered writes must not be mixed then.
        """
        may = self._can_use_direct_io(data, offset)
        fd = self._direct if may else self.fd
        while len(data):
            sent = os.pwrite(fd, data, offset)
            if not sent:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if not may and sent >= PAGE_BYTES:
                # Start the transfer to the disk while the next bytes arrive, and keep none in the page cache.
                os.posix_fadvise(fd, offset, sent, os.POSIX_FADV_DONTNEED)
            data, offset = data[sent:], offset + sent

    def _can_use_direct_io(self, data: memoryview, offset: int) -> bool:
        return self._direct != -1 and offset % PAGE_BYTES == 0 == len(data) % PAGE_BYTES
