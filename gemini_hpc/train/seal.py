"""Waiting for a version to be sealed: bounded, and given up at once when there is nothing to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gemini_hpc.wire.page import STATE_DEGRADED, STATE_FROZEN, ControlPage

_POLL_S = 0.0003
_STOPPED_S = 1.0  # a poll that took so long: this process was stopped (a suspended job), and so were its peers


class SealGate:
    """Waits on the control page. Once a wait has run out (or the agent has gone), there is no more waiting until a
    seal appears that is newer than what was sealed then."""

    def __init__(
        self,
        page: Callable[[], ControlPage | None],
        lost: Callable[[], bool],
        epoch: int,
        timeout_s: float,
        degraded: Callable[[str], None],
        restored: Callable[[int], None],
    ) -> None:
        self._page, self._lost, self._epoch, self._timeout_s = page, lost, epoch, timeout_s
        self._on_degraded, self._on_restored = degraded, restored
        self._degraded_at: tuple[int, int] | None = None
        self._newest = (0, 0)
        self._lock = threading.Lock()
        self.waited_s = 0.0

    @property
    def sealed(self) -> tuple[int, int]:
        """The newest (epoch, version) seen sealed."""
        page = self._page()
        if page is not None:
            self._newest = max(self._newest, page.sealed)
        return self._newest

    @property
    def degraded(self) -> bool:
        """True while there is no waiting; a newer seal ends it."""
        if self._degraded_at is not None and not self._lost() and self.sealed > self._degraded_at:
            with self._lock:
                was, self._degraded_at = self._degraded_at, None
            if was is not None:
                self._on_restored(self._newest[1])
        return self._degraded_at is not None

    def degrade(self, reason: str) -> None:
        """Stop waiting until a newer seal appears."""
        newest = self.sealed
        with self._lock:
            first, self._degraded_at = self._degraded_at is None, newest
        if first:
            self._on_degraded(reason)

    def wait(self, version: int, hopeless: Callable[[], bool]) -> bool:
        """True when `version` of this epoch is sealed; False when there is no point in waiting (any longer)."""
        return self.wait_for((self._epoch, version), hopeless)

    def wait_for(self, wanted: tuple[int, int], hopeless: Callable[[], bool]) -> bool:
        """The same for any (epoch, version)."""
        if self.degraded:
            return False
        started = looked = time.monotonic()
        stopped_s = 0.0
        try:
            while self.sealed < wanted:
                now = time.monotonic()
                stopped_s += now - looked if now - looked > _STOPPED_S else 0.0
                looked = now
                if hopeless() or self._degraded_at is not None:
                    return False
                page = self._page()
                if page is not None and page.abandoned >= wanted:
                    return False
                if self._lost() or page is None:
                    self.degrade("the agent is gone")
                    return False
                if page.state in (STATE_FROZEN, STATE_DEGRADED):
                    self.degrade("the agents cannot seal now")
                    return False
                if now - started - stopped_s > self._timeout_s:
                    self.degrade(f"version {wanted[1]} was not sealed within {self._timeout_s:g} s")
                    return False
                time.sleep(_POLL_S)
            return True
        finally:
            self.waited_s += time.monotonic() - started
