"""The lock on an open file, which a process waits for within bounds: another one may hold it for ever."""

from __future__ import annotations

import fcntl

from gemini_hpc import clock

_POLL_S = 0.01  # pause between two attempts: no process of ours holds such a lock for long


def acquire_lock_within(fd: int, timeout_s: float = 0.0) -> bool:
    """Lock the file of a descriptor for this process alone. Return whether that succeeded in time."""
    deadline = clock.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if clock.monotonic() >= deadline:
                return False
            clock.sleep(_POLL_S)
