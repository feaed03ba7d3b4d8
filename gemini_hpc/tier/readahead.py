"""Read-ahead for a reader: the disk is busy while Python loads HDF5 and while a part is digested.

Several reads run at a time. The interpreter's lock must change hands quickly meanwhile. With Python's default
switch interval of 5 ms the disk waits for Python's imports.
"""

from __future__ import annotations

import os
import sys
import threading

from gemini_hpc.tier.direct_io import PART_BYTES, File, allocate_buffers, start_threads

_THREADS = 8
_WINDOW = 32  # in parts
_SWITCH_S = 0.001  # the reading threads get the GIL back this soon; Python waits 5 ms


class Ahead:
    """A background reader of about `length` bytes of a file from about `begin` on, in order.

    A `copy_ahead` from a part discards all earlier parts. The first `copy_ahead` corrects where the bytes really
    begin.
    Creating an instance raises OSError if the file cannot be opened.
    """

    def __init__(self, path: str, begin: int, length: int) -> None:
        self._file = File(path, os.O_RDONLY)
        self._buffers = allocate_buffers(_WINDOW)
        self._wanted = self._next = self._first = begin // PART_BYTES
        self._last = -(-(begin + length) // PART_BYTES) + 1  # plus HDF5's own bytes in between
        self._read: dict[int, int] = {}  # number of bytes of each part that has arrived
        self._busy: set[int] = set()  # parts being read now
        self._over = self._taken = False
        lock = threading.Lock()
        self._room, self._came = threading.Condition(lock), threading.Condition(lock)
        self._before_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self._threads = start_threads(_THREADS, self._run, "gemini-ahead")

    def copy_ahead(self, into: memoryview, offset: int) -> int:
        """Copy bytes from offset `offset` that are read ahead into `into`; return their number.

        The number is 0 if the bytes were not read ahead or could not be read. The caller reads them itself
        then.
        """
        part, skip = divmod(offset, PART_BYTES)
        with self._came:
            if not self._taken:
                self._taken = True
                self._last += max(0, part - self._first)
            if not self._wanted <= part < self._last:
                return 0
            self._wanted, self._next = part, max(self._next, part)
            for done in [known for known in self._read if known < part]:
                del self._read[done]
            self._room.notify_all()
            self._came.wait_for(lambda: part in self._read)
            count = max(0, min(self._read[part] - skip, len(into)))
        into[:count] = self._buffers[part % _WINDOW][skip : skip + count]
        return count

    def close(self) -> None:
        """Stop the threads and close the file."""
        with self._room:
            self._over = True
            self._room.notify_all()
        for thread in self._threads:
            thread.join()
        self._file.close()
        sys.setswitchinterval(self._before_s)

    def _run(self) -> None:
        while (part := self._claim_part()) is not None:
            try:
                count = self._file.read(self._buffers[part % _WINDOW], part * PART_BYTES)
            except OSError:
                count = 0
            with self._came:
                self._busy.discard(part)
                if part >= self._wanted:
                    self._read[part] = count
                self._came.notify()
                self._room.notify_all()

    def _claim_part(self) -> int | None:
        """Wait for room for another part; return its number, None at the end."""
        with self._room:
            self._room.wait_for(lambda: self._over or self._fits())
            if self._over:
                return None
            self._busy.add(part := self._next)
            self._next += 1
            return part

    def _fits(self) -> bool:
        """Return whether the next part has a free buffer that no thread is reading into."""
        part = self._next
        free = all(busy % _WINDOW != part % _WINDOW for busy in self._busy)
        return part < min(self._last, self._wanted + _WINDOW) and free
