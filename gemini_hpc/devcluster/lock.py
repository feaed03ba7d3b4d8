"""Locks between concurrent cluster tools, made with flock, so that a killed tool releases them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ROOT, ClusterFiles

# longer than any `up` or `down` can take
WAIT_S = 90.0


def _acquire(path: Path, flags: int, operation: int, wait_s: float) -> int | None:
    """Return a descriptor that holds the lock on the file at `path` now, None after the time-out."""
    deadline = clock.monotonic() + wait_s
    while True:
        try:
            ROOT.mkdir(mode=0o755, parents=True, exist_ok=True)
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            # Another tool is just removing the directory with its last cluster.
            continue
        held = False
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
            # Its last holder may have removed the name meanwhile: then this lock protects nothing.
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
def hold_cluster_lock(layout: ClusterFiles) -> Iterator[None]:
    """Hold the lock of a cluster, so that only one tool at a time starts or ends it, or switches its nodes."""
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
def hold_start_lock() -> Iterator[None]:
    """Hold the lock of starting clusters, which keeps the shared mount points from being removed."""
    fd = _acquire(ROOT, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_SH, WAIT_S)
    if fd is None:
        raise DevclusterError(f"another command has been tidying {ROOT} for over {WAIT_S:g} s")
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def try_tidy_lock() -> Iterator[bool]:
    """Yield whether no cluster is starting; if so, none can start until the end of the block."""
    fd = _acquire(ROOT, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_EX, 0.0)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)
