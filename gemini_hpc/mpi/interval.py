"""Choice of the versions to save: one in j, so that saving costs no more than the ceiling.

Each rank measures what a version costs it and says in `step()` which j it needs. All ranks hear the same list there,
and take the largest j. So they agree, whatever each of them has measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from gemini_hpc import clock
from gemini_hpc.core.pace import IterationPace
from gemini_hpc.core.wait_budget import WaitBudget

_SURE = 3  # versions that are measured before j changes; the cheapest of this many is what a version costs at least
_LATEST = 8
_TELL_AGAIN = 4  # the user is told again when versions are this many times as rare
_TOLD_WAIT_S = 1.0  # least wait for the first versions that the user is told of: a shorter one goes unnoticed


class Need(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part in the choice of j.

    Attributes:
        j: The rank needs that only one version in j is saved; 0: it has not measured enough.
        met_s: Seconds that the ranks' last meeting took on this rank, waits for others included.
    """

    j: int = 0
    met_s: float = 0.0


class SaveInterval:
    """The versions that one rank saves.

    Attributes:
        j: One version in j is saved.
    """

    def __init__(self, every: int, overhead: float, rank: int, say: Callable[[str], None]) -> None:
        """Create a choice that saves every version at first.

        Args:
            every: The j that the user has chosen; 0: as often as the ceiling allows.
            overhead: The ceiling, as a share of the program's time.
            rank: The rank.
            say: Prints a line for the user.
        """
        self.j = max(1, every)
        self._every, self._overhead, self._rank, self._say = every, overhead, rank, say
        self._next, self._told = 0, 1
        self._pace, self._budget, self._settled = IterationPace(overhead), WaitBudget(overhead), False
        self._own: deque[float] = deque(maxlen=_SURE)
        self._met: deque[float] = deque(maxlen=_SURE)
        self._sealed: deque[float] = deque(maxlen=_LATEST)
        self._met_s = 0.0
        self._left_at: float | None = None

    def saves(self, version: int) -> bool:
        """Return whether this version is saved."""
        return version % self._every == 0 if self._every else version >= self._next

    @property
    def patience_s(self) -> float | None:
        """Return the longest wait for the version before, in seconds; None where the user has chosen j."""
        return None if self._every else self._budget.left_s

    # ---- measurements ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Record the beginning of a `step()`, so the end of an iteration of the program."""
        if self._left_at is not None:
            length_s = clock.monotonic() - self._left_at
            self._pace.note(length_s)
            self._budget.trained(length_s)

    def leave(self) -> None:
        """Record the end of a `step()`."""
        self._left_at = clock.monotonic()

    def met(self, seconds: float) -> None:
        """Record the seconds that the ranks' meeting in a `step()` took on this rank."""
        self._met_s = seconds

    def sealed(self, seconds: float) -> None:
        """Record the seconds from a version's `step()` to its seal, or to now where there is none yet."""
        self._sealed.append(seconds)

    def spend(self, seconds: float) -> None:
        """Record seconds that the program has lost now."""
        self._budget.spend(seconds)

    def cost(self, seconds: float) -> None:
        """Record the seconds of the program that one version has cost at any j, meetings excluded."""
        self._own.append(seconds)

    @property
    def own_s(self) -> float:
        """Return the seconds that a version costs the program at least."""
        return min(self._own, default=0.0) + min(self._met, default=0.0)

    @property
    def sealed_s(self) -> float:
        """Return the seconds from step() to seal below which three quarters of the versions stay; 0.0: unknown."""
        return sorted(self._sealed)[(3 * len(self._sealed)) // 4] if self._sealed else 0.0

    # ---- the choice ------------------------------------------------------------------------------------

    def need(self) -> Need:
        """Return what this rank needs, for all ranks."""
        if self._every or len(self._own) < _SURE:
            return Need(0, self._met_s)
        wish = self._pace.wish(self.j, self.j, self.sealed_s, self.own_s, 0)
        return Need(wish.j, self._met_s)

    def adopt_needs(self, needs: Sequence[Need], version: int) -> None:
        """Follow the needs of all ranks from this version on, as all ranks do.

        Args:
            needs: Needs by rank.
            version: Number of this `step()`.
        """
        if self._every:
            return
        # A rank that comes early waits for the program's own imbalance. The last one shows what the meeting costs.
        self._met.append(min(need.met_s for need in needs))
        if all(need.j > 0 for need in needs):
            self.j = max(need.j for need in needs)
            self._report_interval(next(rank for rank, need in enumerate(needs) if need.j == self.j))
        self._next = version + self.j

    def _report_interval(self, because: int) -> None:
        if not self._settled:
            self._settled = True
            waited_s = self._budget.first_waited_s
            self._budget.end_first_phase()
            if waited_s >= _TOLD_WAIT_S and self._rank == 0:
                self._say(
                    f"rank 0: the program has waited {waited_s:.1f} s for its first versions; "
                    f"from now on versions take at most {100 * self._overhead:g} % of its time"
                )
        if not (self.j >= _TELL_AGAIN * self._told or self._told <= 1 < self.j):
            return
        self._told = self.j
        if self._rank != because:
            return
        usual_s = self._pace.usual_s
        if self.own_s > self._overhead * usual_s:
            why = f"step() takes {self.own_s:.2g} s to capture the state"
        else:
            why = f"a version is sealed {self.sealed_s:.2g} s after step() (copy, digests, votes)"
        self._say(
            f"rank {self._rank}: {why} in iterations of {usual_s:.2g} s: saving one version in {self.j}; "
            f"a failure repeats at most {2 * self.j} steps"
        )
