"""The choice of the steps whose version is saved: as many as the ceiling allows, the same on all ranks.

Each rank measures what a saved `step()` costs it, and the iterations between. In the collective call of a saved step
each rank names the interval that it wants. All ranks adopt the largest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

LEAST_S = 0.002  # a shorter call is negligible: a busy node's processors cause such delays now and then
_SURE = 3  # the shortest of this many calls is the least cost
_LENGTHS = 8  # iterations that their median is taken of
MOST = 1 << 20
_REPORT_AGAIN = 2  # an interval so many times as long as the last reported one is reported


class Interval:
    """The interval between saved steps.

    Attributes:
        j: One step in j is saved.
    """

    def __init__(self, every: int, overhead: float) -> None:
        """Begin with every step.

        Args:
            every: Save one step in so many; 0: as `overhead` allows.
            overhead: Greatest share of the program's time that saving may cost.
        """
        self._every, self._overhead = every, overhead
        self.j = every or 1
        self._least = 1  # no shorter interval is tried again
        self._lowered = False
        self._next = 0
        self._costs: deque[float] = deque(maxlen=_SURE)
        self._lengths: deque[float] = deque(maxlen=_LENGTHS)
        self._reported = 1

    def saves(self, step: int) -> bool:
        """Return whether this step's version is saved. All ranks get the same answer at their same step."""
        return step % self._every == 0 if self._every else step >= self._next

    def ended(self, iteration_s: float) -> None:
        """Record an iteration's length in seconds, without our part."""
        self._lengths.append(iteration_s)

    def saved(self, cost_s: float) -> None:
        """Record the seconds that a saved step has cost this rank."""
        self._costs.append(cost_s)

    @property
    def cost_s(self) -> float:
        """Return the seconds that a saved step costs at least; 0 where negligible or unknown."""
        least_s = min(self._costs) if len(self._costs) == _SURE else 0.0
        return least_s if least_s >= LEAST_S else 0.0

    @property
    def iteration_s(self) -> float:
        """Return the usual length of an iteration in seconds; 0 where unknown."""
        return median(self._lengths) if self._lengths else 0.0

    def wanted(self) -> int:
        """Return the interval that this rank's measurements require."""
        if self._every or len(self._costs) < _SURE:
            return self.j
        allowed_s = self._overhead * self.iteration_s
        needed = max(1, math.ceil(min(self.cost_s / allowed_s, MOST))) if allowed_s > 0 else self.j
        # A longer interval lets an exchange end before the next saved step, and so makes that step cheaper.
        return needed if needed > self.j or 2 * needed <= self.j else self.j

    def agree(self, step: int, wanted: Sequence[int]) -> bool:
        """Adopt the longest interval that a rank wants, from this saved step on. Return whether it is to be reported.

        Args:
            step: The saved step.
            wanted: The interval that each rank wants, the same list on all ranks.
        """
        if self._every:
            return False
        before, asked = self.j, min(max((1, *wanted)), MOST)
        self.j = max(asked, self._least)
        if self.j > before and self._lowered:
            self._least = self.j  # it has been tried: no interval may swing between two values
        self._lowered = self._lowered or self.j < before
        if self.j != before:
            self._costs.clear()  # they were of another interval
        self._next = step + self.j
        news = self.j >= _REPORT_AGAIN * self._reported
        if news:
            self._reported = self.j
        return news
