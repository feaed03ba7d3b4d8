"""Bound the time that a training waits for its versions."""

from __future__ import annotations

FIRST_S = 5.0  # longest wait of a training in all, before a frequency that keeps the ceiling is known
MOST_SAVED_S = 1.5  # of what was not waited in the past, so much may be waited at once


class WaitBudget:
    """The seconds that a training may still wait at its optimizer: `FIRST_S` in all until `settle`, and the ceiling's
    share of the time that it has trained."""

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._first_s, self._saved_s = FIRST_S, 0.0
        self.first_waited_s = 0.0

    @property
    def left_s(self) -> float:
        """Return the seconds that may be waited now."""
        return max(0.0, self._first_s + self._saved_s)

    def trained(self, seconds: float) -> None:
        """Add the share of so much time."""
        self._saved_s = min(MOST_SAVED_S, self._saved_s + self._ceiling * seconds)

    def spend(self, seconds: float) -> None:
        """Take off what the training has lost. What is lost beyond the budget is made up for later."""
        of_first_s = min(self._first_s, seconds)
        self._first_s -= of_first_s
        self.first_waited_s += of_first_s
        self._saved_s -= seconds - of_first_s

    def settle(self) -> None:
        """End the first time: a frequency is known that keeps the ceiling."""
        self._saved_s = min(MOST_SAVED_S, self._saved_s + self._first_s)
        self._first_s = 0.0
