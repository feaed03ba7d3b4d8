"""Write-behind for a writer: several parts are on their way to the disk while the next is digested.

Bytes of one page are never written in both ways, direct and through the page cache, at the same time. The
kernel fails a direct write if a neighbouring page in the same folio becomes dirty meanwhile. Unaligned bytes
are therefore kept until no direct write is running, or until many are kept.
"""

from __future__ import annotations

import os
from queue import SimpleQueue

from gemini_hpc.tier.direct_io import PAGE_BYTES, File, allocate_buffers, start_threads

_THREADS = 4
_BUFFERS = 12
_KEPT_BYTES = 16 << 20

Task = tuple[memoryview, int, int]  # buffer, number of bytes in it, file offset


class Behind:
    """A background writer into an existing file.

    With `direct`, no other writer may use the file between the first `put` and the end of `wait`. Creating an
    instance raises OSError. Later calls raise the OSError of an earlier background write.
    """

    def __init__(self, path: str, *, direct: bool) -> None:
        self._file = File(path, os.O_WRONLY, direct=direct)
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for buffer in allocate_buffers(_BUFFERS):
            self._free.put(buffer)
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._kept: list[tuple[bytes, int]] = []
        self._kept_bytes = 0
        self._trouble: OSError | None = None
        self._threads = start_threads(_THREADS, self._run, "gemini-behind")

    def put(self, data: memoryview, offset: int) -> memoryview:
        """Queue at most `PART_BYTES` bytes for offset `offset`, and return a copy of them.

        The copy may be read until the next call.
        """
        buffer = self._free.get()
        copy = buffer[: len(data)]
        copy[:] = data
        whole = 0 if offset % PAGE_BYTES else len(data) // PAGE_BYTES * PAGE_BYTES
        if whole < len(data):
            self._kept.append((bytes(copy[whole:]), offset + whole))
            self._kept_bytes += len(data) - whole
        if whole:
            self._tasks.put((buffer, whole, offset))
        else:
            self._free.put(buffer)
        if self._kept_bytes > _KEPT_BYTES:
            self.wait()
        self._check()
        return copy

    def wait(self) -> None:
        """Wait until all queued bytes are written."""
        all_of_them = [self._free.get() for _ in range(_BUFFERS)]
        for buffer in all_of_them:
            self._free.put(buffer)
        self._check()
        for data, at in self._kept:
            self._file.write(memoryview(data), at)
        self._kept, self._kept_bytes = [], 0

    def sync(self) -> None:
        """Sync the written bytes to the disk."""
        os.fdatasync(self._file.fd)

    def close(self) -> None:
        """Stop the threads and close the file; bytes not awaited by `wait` may be lost."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._file.close()

    def _check(self) -> None:
        if self._trouble is not None:
            raise self._trouble

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            buffer, size, at = task
            try:
                if self._trouble is None:
                    self._file.write(buffer[:size], at)
            except OSError as error:
                self._trouble = self._trouble or error
            self._free.put(buffer)
