"""The one clock of this package. A simulation brings its own, with a time for each of its hosts."""

from __future__ import annotations

import time as _time
from typing import Protocol


class Source(Protocol):
    """Where time comes from."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some moment; the same for all processes of a host, and never set back."""

    def time(self) -> float:
        """Seconds since 1970, as far as the host knows."""

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""


class _System:
    monotonic_ns = staticmethod(_time.monotonic_ns)
    time = staticmethod(_time.time)
    sleep = staticmethod(_time.sleep)


class _Now:
    source: Source = _System()


def use(source: Source | None) -> None:
    """From now on, in this process, time comes from there; None: from the system."""
    _Now.source = source or _System()


def monotonic() -> float:
    """Seconds since some moment; see `Source`."""
    return _Now.source.monotonic_ns() * 1e-9


def monotonic_ns() -> int:
    """Nanoseconds since some moment; see `Source`."""
    return _Now.source.monotonic_ns()


def time() -> float:
    """Seconds since 1970, as far as this host knows."""
    return _Now.source.time()


def sleep(seconds: float) -> None:
    """Block the calling thread."""
    _Now.source.sleep(seconds)
