"""The only clock of this package; a simulation replaces it with one that has a time for each of its hosts."""

from __future__ import annotations

import time as _time
from typing import Protocol

DAY_S = 86400.0  # 24 hours


class Source(Protocol):
    """A source of time."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since some moment; the same for all processes of a host, and never set back."""

    def time(self) -> float:
        """Return seconds since 1970, according to the host's clock."""

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""


class _System:
    monotonic_ns = staticmethod(_time.monotonic_ns)
    time = staticmethod(_time.time)
    sleep = staticmethod(_time.sleep)


class _Now:
    source: Source = _System()


def use(source: Source | None) -> None:
    """Set the source of time of this process; None means the system's clock."""
    _Now.source = source or _System()


def monotonic() -> float:
    """Return seconds since some moment (see `Source`)."""
    return _Now.source.monotonic_ns() * 1e-9


def monotonic_ns() -> int:
    """Return nanoseconds since some moment (see `Source`)."""
    return _Now.source.monotonic_ns()


def time() -> float:
    """Return seconds since 1970, according to this host's clock."""
    return _Now.source.time()


def sleep(seconds: float) -> None:
    """Block the calling thread."""
    _Now.source.sleep(seconds)
