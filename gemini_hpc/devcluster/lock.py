"""Locks between several cluster tools at once. They are flocks: a killed tool lets go of them by itself."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ROOT, Layout

# Longer than any `up` or `down` can take.
WAIT_S = 90.0


def _acquire(path: Path, flags: int, operation: int, wait_s: float) -> int | None:
    """A descriptor that holds the lock on what `path` names now; None if it was not to be had in time."""
    deadline = clock.monotonic() + wait_s
    while True:
        try:
            ROOT.mkdir(mode=0o755, parents=True, exist_ok=True)
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            # The last cluster's tool is just removing the directory.
            continue
        held = False
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
            # Its last holder may have removed the name while we waited: then this lock protects nothing.
            held = os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            pass
        except BlockingIOError:
            if clock.monotonic() > deadline:
                return None
            clock.sleep(0.02)
        finally:
            if not held:
                os.close(fd)
        if held:
            return fd


@contextmanager
def cluster(layout: Layout) -> Iterator[None]:
    """Only one tool at a time starts or ends a cluster, or switches its nodes."""
    fd = _acquire(layout.lock, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX, WAIT_S)
    if fd is None:
        raise DevclusterError(f"another command has been working on cluster {layout.name} for over {WAIT_S:g} s")
    try:
        yield
    finally:
        if not layout.directory.exists():
            layout.lock.unlink(missing_ok=True)
        os.close(fd)


@contextmanager
def starting() -> Iterator[None]:
    """Held by every starting cluster: nobody removes the shared mount points meanwhile."""
    fd = _acquire(ROOT, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_SH, WAIT_S)
    if fd is None:
        raise DevclusterError(f"another command has been tidying {ROOT} for over {WAIT_S:g} s")
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def tidying() -> Iterator[bool]:
    """True if no cluster is starting, and none can start until the end."""
    fd = _acquire(ROOT, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_EX, 0.0)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)
