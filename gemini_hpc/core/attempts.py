"""The attempts of one job step, as its launchers and their agents know them (`gemini_hpc.launch`).

All ranks of a step are to be in the same attempt. An attempt gives way to a later one, and the end of them stays:
what is known only grows, and two who know different things know the same after each has heard the other (a join). So
it may be passed on in any order, twice, or late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Known:
    """attempt: in which all ranks are to be; reason: why the one before ended; over: why no other one follows; done:
    a rank has ended with success, and would be missing in another attempt."""

    attempt: int = 0
    reason: str = ""
    over: str = ""
    done: bool = False

    def join(self, other: Known) -> Known:
        """What both know."""
        attempt, reason = max((self.attempt, self.reason), (other.attempt, other.reason))
        return Known(attempt, reason, max(self.over, other.over), self.done or other.done)

    def failed(self, attempt: int, reason: str) -> Known:
        """A rank has ended without success in this attempt."""
        if attempt < self.attempt or self.over:  # it is over already, for the same reason or another one
            return self
        if self.done:
            return replace(self, over=f"{reason}, and another rank has already ended with success")
        return self.join(Known(attempt + 1, reason))
