"""The pace of a training on this node, measured from one version that is begun to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from gemini_hpc import clock
from gemini_hpc.wire.inspect_schema import PaceState

_KEPT = 32  # number of gaps that the median is taken of
_LATE_S = 3600.0  # an older report says nothing of the pace


class VersionGaps:
    """The gaps between versions of one launch of one training on this node."""

    def __init__(self, clock: Callable[[], float] = clock.monotonic) -> None:
        self._clock = clock
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._longest_s = 0.0
        self._last_s: float | None = None
        self.version = 0

    def reset(self) -> None:
        """Forget all gaps: a new launch begins, or no more versions of this one are expected."""
        self._gaps.clear()
        self._longest_s, self._last_s, self.version = 0.0, None, 0

    def record_version(self, version: int, age_s: float = 0.0) -> None:
        """Record that a rank has begun this version. Of several ranks the first one counts.

        A version of an impossible age makes no gap, and counts as begun now.

        Args:
            version: The version.
            age_s: Seconds since then, according to the rank. Reports that have waited for an agent come together.
        """
        if version <= self.version:
            return
        now, last_s = self._clock(), self._last_s
        begun_s = now - age_s
        is_possible = 0 <= age_s <= _LATE_S and (last_s is None or begun_s >= last_s)
        if is_possible and last_s is not None:
            self._gaps.append(begun_s - last_s)
            self._longest_s = max(self._longest_s, begun_s - last_s)
        self._last_s, self.version = begun_s if is_possible else now, version

    def build_state(self) -> PaceState | None:
        """Return the current pace, or None before the second version."""
        if self._last_s is None or not self._gaps:
            return None
        return PaceState(self._clock() - self._last_s, median(self._gaps), self._longest_s)
