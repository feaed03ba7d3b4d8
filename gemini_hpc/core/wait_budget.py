"""A bound on the time that a training waits for its versions."""

from __future__ import annotations

# longest total wait before a frequency within the ceiling is known: 5 s, less what a poll and a wakeup add
FIRST_S = 4.9
MOST_SAVED_S = 1.5  # unused budget is saved up to this, so no single wait is longer


class WaitBudget:
    """The seconds that a training may still wait at its optimizer.

    The budget is `FIRST_S` in all until `end_first_phase`, plus the ceiling's share of the time trained so far.
    """

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._first_s, self._saved_s = FIRST_S, 0.0
        self.first_waited_s = 0.0

    @property
    def left_s(self) -> float:
        """Return the seconds that the training may wait now."""
        return max(0.0, self._first_s + self._saved_s)

    def add_training(self, seconds: float) -> None:
        """Add the ceiling's share of `seconds` of training."""
        self._saved_s = min(MOST_SAVED_S, self._saved_s + self._ceiling * seconds)

    def spend(self, seconds: float) -> None:
        """Subtract the seconds that the training has lost. Loss beyond the budget is made up for later."""
        of_first_s = min(self._first_s, seconds)
        self._first_s -= of_first_s
        self.first_waited_s += of_first_s
        self._saved_s -= seconds - of_first_s

    def end_first_phase(self) -> None:
        """End the initial phase because a frequency within the ceiling is known."""
        self._saved_s = min(MOST_SAVED_S, self._saved_s + self._first_s)
        self._first_s = 0.0
