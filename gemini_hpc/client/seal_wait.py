"""Waiting for a version to be sealed: bounded, and given up at once when there is nothing to wait for."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from gemini_hpc import clock
from gemini_hpc.wire.control_page import STATE_DEGRADED, STATE_FROZEN, ControlPage

_POLL_S = 0.0003
_PROBE_S = 0.25
_RAREST_PROBE = 64
_STOPPED_S = 1.0  # a poll that took so long: this process was stopped (a suspended job), and so were its peers


class SealGate:
    """Waits on the control page. Once a wait has run out, there is no more waiting until a seal appears that is newer
    than what was sealed then: only the 1st, 3rd, 7th, 15th ... time a short one, without which ranks that wait and
    ranks that do not would save different versions, and none be sealed again."""

    def __init__(
        self,
        page: Callable[[], ControlPage | None],
        lost: Callable[[], bool],
        epoch: int,
        timeout_s: float,
        degraded: Callable[[str], None],
        restored: Callable[[int], None],
        lost_s: float = 0.0,
    ) -> None:
        """lost_s: how long an agent that is gone is waited for, another one or the end of this process."""
        self._lost_s = lost_s
        self._page, self._lost, self._epoch, self._timeout_s = page, lost, epoch, timeout_s
        self._on_degraded, self._on_restored = degraded, restored
        self._degraded_at: tuple[int, int] | None = None
        self._degradings = 0
        self._until_probe = self._probe_gap = 1
        self._patient = False  # the next wait is a long one all the same
        self._newest = (0, 0)
        self._missed: tuple[tuple[int, int], float] | None = None
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
    def seal(self) -> tuple[tuple[int, int], float]:
        """Return the last seal on the page and its time (CLOCK_MONOTONIC); ((0, 0), 0.0) without a page."""
        page = self._page()
        return page.seal if page is not None else ((0, 0), 0.0)

    @property
    def patient(self) -> bool:
        """Whether an agent that is gone is waited for."""
        return self._lost_s > 0

    @property
    def degraded(self) -> bool:
        """True while there is no waiting; a newer seal ends it."""
        if self._degraded_at is not None and not self._lost() and self.sealed > self._degraded_at:
            with self._lock:
                was, self._degraded_at = self._degraded_at, None
            if was is not None:
                self._on_restored(self._newest[1])
        return self._degraded_at is not None

    def degrade(self, reason: str, *, gone: bool = False) -> None:
        """Stop waiting until a newer seal appears. gone: another rank does not answer any more. It may be dead, and
        then a step completed now would be one more that is repeated: who waits goes on, and who does not will, once,
        until Slurm has ended the job or the patience is over."""
        newest = self.sealed
        with self._lock:
            first, self._degraded_at, self._missed = self._degraded_at is None, newest, None
            if first:
                self._until_probe = self._probe_gap = 1
                self._patient = gone
            if not gone:
                self._degradings += 1
        if first:
            self._on_degraded(reason)

    def abandoned(self, version: int) -> bool:
        """Return whether the agents have given this version up; the rank that could not take it has reported why."""
        page = self._page()
        return page is not None and page.abandoned >= (self._epoch, version)

    def missed(self, version: int) -> None:
        """The training went on without this version, though nobody said that none can be sealed. One such is nothing;
        where a later one is missed as well, longer than the timeout after it, and no seal has come between them,
        protection is degraded."""
        newest, now = self.sealed, clock.monotonic()
        with self._lock:
            if self._missed is None or newest >= self._missed[0]:
                self._missed = (self._epoch, version), now
            (_, first), since = self._missed
        if version > first and now - since > self._timeout_s:
            self.degrade(f"no version was sealed from version {first} on")

    def wait(
        self,
        version: int,
        hopeless: Callable[[], bool],
        moved_at: Callable[[], float] = lambda: 0.0,
        patience_s: float = math.inf,
        began_at: Callable[[], float] = lambda: 0.0,
        quiet_s: float = 0.0,
    ) -> bool:
        """True when `version` of this epoch is sealed; False when there is no point in waiting (any longer).

        moved_at: when something of the version last arrived somewhere (CLOCK_MONOTONIC): the timeout counts from
        there. After patience_s it returns False, and nothing is degraded: the version is only late. (Where a node may
        be dead the timeout counts alone: the next step would be repeated.)
        began_at: from when that counts, if later than the call: a device may not have come to where its host waits.
        quiet_s: nothing may arrive for so long, where that is more than the timeout: digests and votes take time.
        """
        return self.wait_for((self._epoch, version), hopeless, moved_at, patience_s, began_at, quiet_s)

    def wait_for(
        self,
        wanted: tuple[int, int],
        hopeless: Callable[[], bool],
        moved_at: Callable[[], float] = lambda: 0.0,
        patience_s: float = math.inf,
        began_at: Callable[[], float] = lambda: 0.0,
        quiet_s: float = 0.0,
    ) -> bool:
        """The same for any (epoch, version)."""
        limit_s = self._timeout_s
        if self.degraded:
            with self._lock:
                patient, self._patient = self._patient, False
            if not patient:
                if not self._probes():
                    return False
                limit_s = min(limit_s, _PROBE_S)
        quiet_s = max(limit_s, quiet_s) if limit_s == self._timeout_s else limit_s
        degradings = self._degradings
        started = looked = clock.monotonic()
        stopped_s, there, lost_at = 0.0, False, math.inf
        try:
            while self.sealed < wanted:
                now = clock.monotonic()
                stopped_s += now - looked if now - looked > _STOPPED_S else 0.0
                looked = now
                if hopeless() or self._degradings != degradings:
                    return False
                page = self._page()
                if page is not None and page.abandoned >= wanted:
                    return False
                if self._lost() or page is None:
                    lost_at = min(lost_at, now)
                    if now - lost_at >= self._lost_s:
                        self.degrade("the agent is gone")
                        return False
                    clock.sleep(_POLL_S)
                    continue
                # A node may be dead: a step completed now would be one more that is repeated. Or an agent comes back.
                stuck = page.state in (STATE_FROZEN, STATE_DEGRADED)
                begun = started + stopped_s
                since, most_s = (begun, limit_s) if stuck else (max(begun, moved_at()), quiet_s)
                if now - since > most_s:
                    late = f"version {wanted[1]} was not sealed within {most_s:g} s"
                    self.degrade("the agents cannot seal now" if stuck else late)
                    return False
                if not stuck and now - max(begun, began_at()) > patience_s:
                    return False
                clock.sleep(_POLL_S)
            there = True
            return True
        finally:
            self._patient = self._patient and there
            self.waited_s += clock.monotonic() - started

    def _probes(self) -> bool:
        """Whether this time it waits although it is degraded."""
        if self._lost():
            return False
        self._until_probe -= 1
        if self._until_probe:
            return False
        self._probe_gap = min(2 * self._probe_gap, _RAREST_PROBE)
        self._until_probe = self._probe_gap
        return True
