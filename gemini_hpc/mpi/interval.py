"""Choice of the versions to save: one in j, so that saving costs no more than the ceiling.

Each rank measures what a version costs it and says in `step()` which j it needs. All ranks hear the same list there,
and take the largest j. So they agree, whatever each of them has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gemini_hpc import clock
from gemini_hpc.client import stats_messages
from gemini_hpc.core.interval_reporter import IntervalReporter, Reason, explain_late_seals
from gemini_hpc.core.pace import IterationPace
from gemini_hpc.core.seal_latency import SealLatency
from gemini_hpc.core.version_cost import VersionCost
from gemini_hpc.core.wait_budget import WaitBudget
from gemini_hpc.wire.traffic import TrafficState


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
        beside: Copies travel while the program computes.
        latency: Time from `step()` to the seal, for versions whose copies travel beside the program.
    """

    def __init__(
        self,
        every: int,
        overhead: float,
        rank: int,
        say: Callable[[str], None],
        seal: Callable[[], tuple[tuple[int, int], float]],
    ) -> None:
        """Create a choice that saves every version at first.

        Args:
            every: The j that the user has chosen; 0: as often as the ceiling allows.
            overhead: The ceiling, as a share of the program's time.
            rank: The rank.
            say: Prints a line for the user.
            seal: Returns the last sealed (epoch, version) and its time (CLOCK_MONOTONIC, seconds).
        """
        self.j, self.beside = max(1, every), False
        self._every, self._overhead, self._rank, self._next = every, overhead, rank, 0
        self._interval_reporter = IntervalReporter(rank, overhead, say, "program")
        self._pace, self._budget = IterationPace(overhead), WaitBudget(overhead)
        self._cost, self.latency = VersionCost(), SealLatency(seal)
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

    def enter_step(self) -> None:
        """Record the beginning of a `step()`, so the end of an iteration of the program."""
        if self._left_at is not None:
            length_s = clock.monotonic() - self._left_at
            self._pace.note_iteration(length_s)
            self._budget.add_training(length_s)

    def leave_step(self) -> None:
        """Record the end of a `step()`."""
        self._left_at = clock.monotonic()

    def record_meeting(self, seconds: float) -> None:
        """Record the seconds that the ranks' meeting in a `step()` took on this rank."""
        self._met_s = seconds

    def record_loss(self, seconds: float) -> None:
        """Record seconds that the program has lost now."""
        self._budget.spend(seconds)

    def record_cost(self, seconds: float) -> None:
        """Record the seconds of the program that one version has cost at any j, meetings excluded."""
        self._cost.add_capture(seconds)

    # ---- the choice ------------------------------------------------------------------------------------

    def compute_need(self) -> Need:
        """Return what this rank needs, for all ranks."""
        if self._every or not self._cost.known:
            return Need(0, self._met_s)
        wish = self._pace.choose_frequency(self.j, self.j, self.latency.whole_s, self._cost.whole_s, 0)
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
        self._cost.add_wait(min(need.met_s for need in needs))
        if all(need.j > 0 for need in needs):
            self.j = max(need.j for need in needs)
            self._interval_reporter.end_first_phase(self._budget)
            because = next(rank for rank, need in enumerate(needs) if need.j == self.j)
            self._interval_reporter.report(
                self.j, self._awaited, lambda news: self._find_reason(), is_cause=self._rank == because
            )
        self._next = version + self.j

    @property
    def _awaited(self) -> int:
        """Return the iterations until a version is awaited: to the end of the one in which the next is saved."""
        return self.j + 1

    def _find_reason(self) -> Reason:
        """Return the reason why not every version is saved, as this rank measures it, and a remedy."""
        usual_s, own_s = self._pace.usual_s, self._cost.whole_s
        if own_s <= self._overhead * usual_s:
            return explain_late_seals(self.latency.whole_s, usual_s)
        helps = "fewer bytes a rank: the arrays over more ranks"
        if not self.beside:
            helps = "MPI_THREAD_MULTIPLE: with it copies travel beside the program"
        return Reason(f"step() takes {own_s:.2g} s to capture the state in iterations of {usual_s:.2g} s", helps)

    def build_state(self, *, sends: bool) -> TrafficState:
        """Return the state for the agent.

        Args:
            sends: Copies go to other nodes.
        """
        state = TrafficState(
            clock.time(),
            "background",
            "mpi" if sends else "none",
            "steady" if self._every or self._interval_reporter.settled else "profile",
            j=self.j,
            s=self._awaited,
            repeated=self.j + self._awaited - 1,
            ceiling=self._overhead,
            sealed_s=self.latency.whole_s or None,
            reason=self._interval_reporter.reason,
        )
        return stats_messages.bound_traffic(state)
