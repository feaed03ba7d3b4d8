"""Bounded waits for the seal of a version, which end at once if waiting is pointless."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from gemini_hpc import clock
from gemini_hpc.wire.control_page import ControlPage

_POLL_S = 0.0003  # pause between two reads of the control page: a seal is seen within it
_PROBE_S = 0.25  # a degraded rank, which no longer waits, checks once for so long whether seals are back
_RAREST_PROBE = 64
_LOOK_S = 0.01  # pause between two reads while an event is awaited, short beside any budget
_STOPPED_S = 1.0  # a longer poll means that this process was stopped (a suspended job), and so were its peers


class Wait:
    """A wait of a program, and the seconds of it in which a node or an agent was missing.

    Attributes:
        stuck: A node or an agent was missing at the last `poll`.
        failing_s: Seconds up to that moment in which one was missing.
    """

    def __init__(self, is_stuck: Callable[[], bool]) -> None:
        """Begin a wait.

        Args:
            is_stuck: Returns whether a node or an agent is missing.
        """
        self._is_stuck, self.stuck, self.failing_s = is_stuck, is_stuck(), 0.0
        self._began = self._looked = clock.monotonic()

    def poll(self) -> None:
        """Count the seconds since the last call, and find out whether a node or an agent is missing now."""
        now = clock.monotonic()
        self.failing_s += now - self._looked if self.stuck else 0.0
        self._looked, self.stuck = now, self._is_stuck()

    def count_own_s(self) -> float:
        """Return the seconds so far in which nothing was missing."""
        self.poll()
        return self._looked - self._began - self.failing_s

    def await_event(self, event: threading.Event, within_s: float = math.inf) -> bool:
        """Return whether the event is set within so many seconds."""
        deadline = clock.monotonic() + within_s
        while (left_s := deadline - clock.monotonic()) > 0.0 and not event.wait(min(_LOOK_S, left_s)):
            self.poll()
        return event.is_set()


class SealGate:
    """A waiting point on the control page for seals.

    After a wait has timed out, no further wait takes place until a seal appears that is newer than the newest one of
    that time. The exceptions are short waits at the 1st, 3rd, 7th, 15th ... call, and at the call after an abandoned
    version. Without them, waiting and non-waiting ranks could save different versions, and none would ever be sealed
    again.
    """

    def __init__(
        self,
        find_page: Callable[[], ControlPage | None],
        is_lost: Callable[[], bool],
        epoch: int,
        timeout_s: float,
        on_degraded: Callable[[str], None],
        on_restored: Callable[[int], None],
        lost_s: float = 0.0,
    ) -> None:
        """Create a gate.

        Args:
            find_page: Returns the current control page.
            is_lost: Returns whether the agent is lost.
            epoch: Epoch of this launch.
            timeout_s: Longest wait for a seal, in seconds.
            on_degraded: Called with the reason when waits end.
            on_restored: Called with the sealed version when a newer seal ends that state.
            lost_s: Seconds to wait for a replacement of a lost agent, or for the end of this process.
        """
        self._lost_s = lost_s
        self._find_page, self._is_lost, self._epoch, self._timeout_s = find_page, is_lost, epoch, timeout_s
        self._on_degraded, self._on_restored = on_degraded, on_restored
        self._degraded_at: tuple[int, int] | None = None
        self._degradings = 0
        self._until_probe = self._probe_gap = 1
        self._patient = False  # the next wait is a long one nevertheless
        self._newest = (0, 0)
        self._missed: tuple[tuple[int, int], float] | None = None
        self._lock = threading.Lock()
        self.waited_s = 0.0

    @property
    def sealed(self) -> tuple[int, int]:
        """Return the newest sealed (epoch, version) seen so far."""
        page = self._find_page()
        if page is not None:
            self._newest = max(self._newest, page.sealed)
        return self._newest

    @property
    def seal(self) -> tuple[tuple[int, int], float]:
        """Return the last seal on the page and its time (CLOCK_MONOTONIC); ((0, 0), 0.0) without a page."""
        page = self._find_page()
        return page.seal if page is not None else ((0, 0), 0.0)

    @property
    def cpu(self) -> tuple[float, float]:
        """Return what the agent's processors give a version; see `ControlPage.cpu`."""
        page = self._find_page()
        return page.cpu if page is not None else (0.0, 0.0)

    @property
    def patient(self) -> bool:
        """Return whether the gate waits for a lost agent."""
        return self._lost_s > 0

    @property
    def degraded(self) -> bool:
        """Return True while the gate does not wait; a newer seal ends this."""
        if self._degraded_at is not None and not self._is_lost() and self.sealed > self._degraded_at:
            with self._lock:
                degraded_at, self._degraded_at = self._degraded_at, None
            if degraded_at is not None:
                self._on_restored(self._newest[1])
        return self._degraded_at is not None

    def degrade(self, reason: str, *, gone: bool = False) -> None:
        """Stop waiting until a newer seal appears.

        Args:
            reason: Reason for the user.
            gone: Another rank no longer answers and may be dead. A step completed now would then be one more to
                repeat. A wait in progress therefore continues, else the next wait is a long one, once. Such a wait
                ends when Slurm ends the job or the time is over.
        """
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

    def is_abandoned(self, version: int) -> bool:
        """Return whether the agents have abandoned this version.

        The rank that could not save it has reported the reason.
        """
        page = self._find_page()
        return page is not None and page.abandoned >= (self._epoch, version)

    def is_stuck(self) -> bool:
        """Return whether nothing can be sealed now: a node or an agent is missing, or a recovery goes on."""
        page = self._find_page()
        return self._is_lost() or page is None or page.is_stuck

    def record_miss(self, version: int) -> None:
        """Record that the training went on without this version.

        No agent has reported that seals are impossible. A single miss has no effect. Protection is degraded if a
        later version is missed too, longer than the timeout after the first, with no seal in between.
        """
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
        is_hopeless: Callable[[], bool],
        moved_at: Callable[[], float] = lambda: 0.0,
        patience_s: float = math.inf,
        began_at: Callable[[], float] = lambda: 0.0,
        quiet_s: float = 0.0,
        epoch: int | None = None,
        part_of: Wait | None = None,
    ) -> bool:
        """Return True once `version` is sealed, or False when further waiting is pointless.

        Args:
            version: Version to wait for.
            is_hopeless: Returns whether waiting is pointless.
            moved_at: Returns when data of the version last arrived anywhere (CLOCK_MONOTONIC seconds). The timeout
                counts from there.
            patience_s: Seconds after which the result is False without degradation, because the version is only late.
                If a node may be dead, only the timeout counts, because the next step would be repeated. Such seconds
                do not count.
            began_at: Returns the start of the patience if later than the call: a device may lag behind its host.
            quiet_s: Seconds for which no data need arrive, if more than the timeout, because digests and votes take
                time.
            epoch: Epoch of the version, None for that of this launch.
            part_of: The caller's wait, which counts the seconds in which a node or an agent is missing.
        """
        wanted = self._epoch if epoch is None else epoch, version
        limit_s = self._timeout_s
        if is_hopeless():
            return False
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
        stopped_s, late_s, is_sealed, lost_at = 0.0, 0.0, False, math.inf
        whole = part_of or Wait(self.is_stuck)
        try:
            while self.sealed < wanted:
                now = clock.monotonic()
                passed_s, looked = now - looked, now
                if passed_s > _STOPPED_S:
                    stopped_s += passed_s
                elif not whole.stuck:
                    late_s = min(late_s + passed_s, max(0.0, now - began_at()))
                if is_hopeless() or self._degradings != degradings:
                    return False
                whole.poll()
                page, stuck = self._find_page(), whole.stuck
                if page is not None and page.abandoned >= wanted and not stuck:
                    self._until_probe = 1  # the agents decide again: waiting costs little
                    return False
                if self._is_lost() or page is None:
                    lost_at = min(lost_at, now)
                    if now - lost_at >= self._lost_s:
                        self.degrade("the agent of this node is gone")
                        return False
                    clock.sleep(_POLL_S)
                    continue
                # A node may be dead, and a step completed now would be one more to repeat. Or an agent comes back.
                begun = started + stopped_s
                since, most_s = (begun, limit_s) if stuck else (max(begun, moved_at()), quiet_s)
                if now - since > most_s:
                    late = f"version {wanted[1]} was not sealed within {most_s:g} s"
                    self.degrade(
                        "the agents cannot seal: a node is missing, or a recovery goes on" if stuck else late
                    )
                    return False
                if not stuck and late_s > patience_s:
                    return False
                clock.sleep(_POLL_S)
            is_sealed = True
            return True
        finally:
            self._patient = self._patient and is_sealed
            with self._lock:
                self.waited_s += clock.monotonic() - started

    def _probes(self) -> bool:
        """Return whether this call waits although the gate is degraded."""
        if self._is_lost():
            return False
        self._until_probe -= 1
        if self._until_probe:
            return False
        self._probe_gap = min(2 * self._probe_gap, _RAREST_PROBE)
        self._until_probe = self._probe_gap
        return True
