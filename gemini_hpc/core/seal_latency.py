"""Measurement of the time from step() to seal of each version."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from statistics import median

_LATEST, _LAGS, _LATE = 8, 4, 3
_MOST_S = 1e5  # a day: longer than any version takes


@dataclass
class VersionTimes:
    """A version under way, with its times (CLOCK_MONOTONIC, seconds)."""

    version: int
    _: KW_ONLY
    taken_at: float  # time of its step()
    saved: bool = True
    copied_at: float = 0.0  # time the own slot was complete; 0.0: not yet
    arrived_at: float = 0.0  # time it had arrived at all holders; 0.0: not yet


class SealLatency:
    """The times to the seal of one rank's versions."""

    def __init__(self, seal: Callable[[], tuple[tuple[int, int], float]]) -> None:
        """Create an empty measurement.

        Args:
            seal: Returns the last sealed (epoch, version) and its time (CLOCK_MONOTONIC, seconds).
        """
        self._seal = seal
        self._job: VersionTimes | None = None
        self._due_at, self._was_due = 0.0, False
        self._whole: deque[float] = deque(maxlen=_LATEST)
        self._fixed: deque[float] = deque(maxlen=_LATEST)
        self._lags: deque[float] = deque(maxlen=_LAGS)

    def begin_version(self, job: VersionTimes) -> None:
        """Measure this version from now on. An earlier, unsealed version counts as late by its delay so far."""
        self.poll()
        if self._job is not None and self._job.saved and self._due_at:
            self._lags.append(max(0.0, job.taken_at - self._due_at))
        self._job, self._due_at, self._was_due = job, 0.0, False

    def record_due(self, due_at: float) -> None:
        """Record that the training wants the newest version sealed at the moment `due_at`.

        Only the first call for a version counts: a version stays due until the next one begins.
        """
        if self._was_due:
            return
        self._was_due = True
        if self._job is None:  # already sealed, or never to be sealed
            self._lags.append(0.0)
        else:
            self._due_at = due_at

    def follow_plan(self) -> None:
        """Forget how late versions were under the former plan."""
        self._lags.clear()

    def poll(self, now: float | None = None) -> None:
        """Record the seal of the version, if there is one.

        Args:
            now: Time at which a version without a seal counts, too, as if it were sealed then; None: it does not.
        """
        job = self._job
        if job is None:
            return
        (_, version), at = self._seal()
        if version != job.version:
            if version > job.version or not job.saved:
                self._job = None
            elif now is not None:
                self._whole.append(now - job.taken_at)
            return
        self._job = None
        whole_s = at - job.taken_at
        if not 0.0 <= whole_s < _MOST_S:
            return  # the seal is of an earlier epoch, or by another clock
        self._whole.append(whole_s)
        if job.copied_at and job.arrived_at:
            self._fixed.append(max(0.0, job.copied_at - job.taken_at) + max(0.0, at - job.arrived_at))
        if self._due_at:
            self._lags.append(max(0.0, at - self._due_at))

    @property
    def whole_s(self) -> float:
        """Return the seconds from step() to seal below which three quarters of the versions stay; 0.0: unknown."""
        return _find_usual_s(self._whole)

    @property
    def fixed_s(self) -> float:
        """Return the part of `whole_s` in which nothing travels (copy, digests, votes); 0.0: unknown."""
        return _find_usual_s(self._fixed)

    def measure_lag_s(self, allowed_s: float) -> float:
        """Return the median delay of the latest versions, if most exceed `allowed_s`; else 0.0. All in seconds.

        After a delay is returned, the next result is about other versions.
        """
        if len(self._lags) < _LAGS or sorted(self._lags)[-_LATE] <= allowed_s:
            return 0.0
        lag_s = median(self._lags)
        self._lags.clear()
        return lag_s


def _find_usual_s(samples: deque[float]) -> float:
    return sorted(samples)[(3 * len(samples)) // 4] if samples else 0.0
