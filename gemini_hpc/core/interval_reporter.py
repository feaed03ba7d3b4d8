"""Words for the user about the versions that are not saved: which, why, and what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gemini_hpc.core.wait_budget import WaitBudget

_TELL_AGAIN = 4  # the user is told again when versions are this many times as rare
_TOLD_WAIT_S = 1.0  # least wait for the first versions that the user is told of: a shorter one goes unnoticed


class Reason(NamedTuple):
    """The reason why not every version is saved, and a remedy."""

    why: str
    helps: str


def explain_late_seals(sealed_s: float, usual_s: float) -> Reason:
    """Return the reason where a version takes long to its seal.

    Args:
        sealed_s: Seconds from step() to the seal.
        usual_s: Length of an iteration in seconds.
    """
    return Reason(
        f"a version is sealed {sealed_s:.2g} s after step() (copy, digests, votes) in iterations of {usual_s:.2g} s",
        "fewer bytes a rank, or more processors for the agents of its node",
    )


class IntervalReporter:
    """The reporter of one rank's choice of versions.

    Attributes:
        settled: A frequency is known that keeps the ceiling.
        reason: Reason why only one version in several is saved, and what helps; "": each one is, or another rank
            needs it.
    """

    def __init__(self, rank: int, overhead: float, say: Callable[[str], None], subject: str = "training") -> None:
        """Create a reporter.

        Args:
            rank: The rank.
            overhead: The ceiling, as a share of the time.
            say: Prints a line for the user.
            subject: "training" or "program", for sentences.
        """
        self._rank, self._overhead, self._say, self._subject = rank, overhead, say, subject
        self._reported_j = 1
        self.settled = False
        self.reason = ""

    def end_first_phase(self, budget: WaitBudget) -> None:
        """End the phase of the first versions, because a frequency is known that keeps the ceiling.

        Report the cost of the first versions to the user, if it was noticeable.
        """
        waited_s = budget.first_waited_s
        if not self.settled and waited_s >= _TOLD_WAIT_S and self._rank == 0:
            self._say(
                f"rank 0: the {self._subject} has waited {waited_s:.1f} s for its first versions; "
                f"from now on versions take at most {100 * self._overhead:g} % of its time"
            )
        self.settled = True
        budget.end_first_phase()

    def report(self, j: int, s: int, reason: Callable[[bool], Reason], *, is_cause: bool, advice: str = "") -> None:
        """Tell the user which versions are not saved, or should not be.

        Args:
            j: One version in j is saved, or should be.
            s: Iterations until a version is awaited.
            reason: Returns the reason. Its argument is whether the user hears it now, which is worth a search for
                details.
            is_cause: Whether this rank is the one that needs this j.
            advice: What the user hears in place of the consequences where j is not in effect.
        """
        news = j >= _TELL_AGAIN * self._reported_j or self._reported_j <= 1 < j
        self.reason = ""
        if news:
            self._reported_j = j
        if j <= 1 or not is_cause:
            return
        why, helps = reason(news)
        self.reason = f"{why}; what helps: {helps}"
        if news:
            then = advice or f"saving one version in {j}; a failure repeats at most {j + s - 1} steps"
            self._say(f"rank {self._rank}: {why}: {then}")
