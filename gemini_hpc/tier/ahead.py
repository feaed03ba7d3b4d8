"""Reading ahead of a reader: the disk is busy from the start, while Python loads HDF5, and while a part is digested.

The kernel's own read-ahead begins with the first read and pauses with it. One call of posix_fadvise takes no more of
a file than that would (8 MB where it was looked at), so it is called part by part. The interpreter's lock must change
hands quickly meanwhile: with its usual 5 ms the disk waits for Python's imports.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_PART_BYTES = 8 << 20
_WINDOW_BYTES = 256 << 20  # so much of the page cache, and not the whole of a large file
_LOOK_S = 0.005
_SWITCH_S = 0.001


class Ahead:
    """Of a part of one file; `through` says how far its reader is. A file that cannot be read is told by who reads
    it."""

    def __init__(self, path: str, begin: int, length: int) -> None:
        self._path, self._begin, self._length = path, begin, length
        self._through = 0
        self._over = threading.Event()
        self._before_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        threading.Thread(target=self._run, name="gemini-ahead", daemon=True).start()

    def through(self, count: int) -> None:
        """`count` more bytes have been read."""
        self._through += count

    def close(self) -> None:
        """No more of it."""
        self._over.set()
        sys.setswitchinterval(self._before_s)

    def _run(self) -> None:
        with suppress(OSError):
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for at in range(0, self._length, _PART_BYTES):
                    while at - self._through > _WINDOW_BYTES and not self._over.wait(_LOOK_S):
                        pass
                    if self._over.is_set():
                        return
                    os.posix_fadvise(fd, self._begin + at, _PART_BYTES, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)
