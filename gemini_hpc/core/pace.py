"""The choice of the save frequency where nothing is sent, by the time to the seal and the cost of a version."""

from __future__ import annotations

from collections import deque
from statistics import median

from gemini_hpc.core.save_interval import Frequency, choose_frequency

PACE_EVERY = 16
_EARLY = (4, 8)
_POINT_S = 1e-6  # a length above zero, for iterations that take no time
_RARER = 1.25


class IterationPace:
    """The usual iteration of one rank, and the frequency that keeps the overhead below its ceiling."""

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._free: deque[float] = deque(maxlen=PACE_EVERY)  # iteration lengths without our own share
        self._gates: deque[float] = deque(maxlen=PACE_EVERY)  # seconds from step() to the optimizer step

    def note_iteration(self, free_s: float) -> None:
        """Record the length of an iteration without our own share."""
        self._free.append(free_s)

    def note_gate(self, seconds: float) -> None:
        """Record the time from step() to the optimizer step."""
        self._gates.append(seconds)

    @property
    def usual_s(self) -> float:
        """Return the usual length of an iteration without our own share, in seconds."""
        return max(_POINT_S, median(self._free)) if self._free else _POINT_S

    @staticmethod
    def is_due(iterations: int) -> bool:
        """Return whether the frequency is chosen after this many iterations: the same on all ranks."""
        return iterations in _EARLY or (iterations > 0 and iterations % PACE_EVERY == 0)

    def choose_frequency(self, j: int, s: int, sealed_s: float, own_s: float, every: int) -> Frequency:
        """Return the frequency that keeps the ceiling.

        The present frequency is kept if only noise speaks against it.

        Args:
            j: Present frequency: one version in j iterations is saved.
            s: Present wait: a version is awaited s optimizer steps later.
            sealed_s: Seconds from step() to the seal.
            own_s: Seconds that a version takes in the training's thread.
            every: The j that the user has forced; 0 for none.
        """
        usual_s = self.usual_s
        gate_s = min(usual_s, median(self._gates)) if self._gates else usual_s

        def compute_delay_s(s: int) -> float:
            return sealed_s - gate_s - (s - 1) * usual_s

        fresh = choose_frequency(compute_delay_s, usual_s, ceiling=self._ceiling, forced=every or None, own_s=own_s)
        kept = choose_frequency(compute_delay_s, usual_s, ceiling=self._ceiling, forced=j, own_s=own_s)
        same = kept.s <= s and kept.overhead <= _RARER * self._ceiling and j <= 2 * fresh.j
        return Frequency(j, s, kept.overhead, j + s - 1, kept.within) if same else fresh
