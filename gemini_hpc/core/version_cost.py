"""Cost of a version in a program's own thread, which counts towards the ceiling."""

from __future__ import annotations

from collections import deque
from statistics import median

_SURE = 3  # the shortest of this many captures is the least cost; one alone may have met anything


class VersionCost:
    """The latest costs of one rank's versions: their captures, and the waits that belong to them."""

    def __init__(self, negligible_s: float = 0.0) -> None:
        """Create an empty record.

        Args:
            negligible_s: A shorter cost counts as none.
        """
        self._negligible_s = negligible_s
        self._latest: deque[float] = deque(maxlen=_SURE)
        self._held: deque[float] = deque(maxlen=_SURE)

    def add_capture(self, seconds: float) -> None:
        """Record the seconds of a version's capture."""
        self._latest.append(seconds)

    def add_wait(self, seconds: float) -> None:
        """Record the seconds that the program has waited for a version beside its capture."""
        self._held.append(seconds)

    @property
    def known(self) -> bool:
        """Return whether enough captures are recorded."""
        return len(self._latest) == _SURE

    @property
    def seconds(self) -> float:
        """Return the seconds that a capture costs at least; 0 where negligible or unknown."""
        return self._find_least_s(self._latest)

    @property
    def held_s(self) -> float:
        """Return the seconds that the program at least waits for a version; 0 where negligible or unknown."""
        return self._find_least_s(self._held)

    @property
    def whole_s(self) -> float:
        """Return the seconds of the program's thread that a version costs at least, at any frequency of saving."""
        return self.seconds + self.held_s

    @property
    def usual_s(self) -> float:
        """Return the median seconds of the latest captures, noise included; 0 where negligible or unknown."""
        return median(self._latest) if self.seconds else 0.0

    def _find_least_s(self, latest: deque[float]) -> float:
        least_s = min(latest) if len(latest) == _SURE else 0.0
        return least_s if least_s >= self._negligible_s else 0.0
