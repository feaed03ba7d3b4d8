"""Guard against completing a step that would be repeated after a node's death or a planned move.

If a node dies after an iteration's last collective, the survivors can still complete its optimizer step. Only the
next collective stops them. If the version before that step is not sealed, the job restarts one version earlier and
repeats two steps. A training therefore stops before such a step while the agents report a dead node, or are still
finding out. The job ends anyway, as soon as Slurm notices.

A job leaves a node on purpose right after a seal. The root informs all agents beforehand (`wire.peer.HoldDown`). Each
rank that sees the seal therefore also sees that it is the last one here, and makes no further step.
"""

from __future__ import annotations

from collections.abc import Callable

from gemini_hpc import clock
from gemini_hpc.wire.control_page import ControlPage

LEAVES_S = 10.0  # longer than agents hold ranks
SUSPECT_S = 3.0  # longer than the agents need to find out whether a silent node is dead
_POLL_S = 0.005  # pause between two checks, short beside any iteration


class StepGuard:
    """A rank's guard, which holds the rank once each time nodes are missing.

    After the longest permitted wait the training goes on, and is not held again until all nodes are back.
    """

    def __init__(
        self,
        find_page: Callable[[], ControlPage | None],
        is_lost: Callable[[], bool],
        hold_s: float,
        say: Callable[[str], None],
        epoch: int,
        *,
        clock: Callable[[], float] = clock.monotonic,
        sleep: Callable[[float], None] = clock.sleep,
    ) -> None:
        """Create a guard.

        Args:
            find_page: Returns the agent's control page.
            is_lost: Returns whether the agent is lost, which tells nothing about other nodes.
            hold_s: Longest wait for the end of a dead node's job, in seconds.
            say: Called with lines for the user.
            epoch: Epoch of the rank, not 0.
            clock: Returns monotonic seconds.
            sleep: Sleeps for a number of seconds.
        """
        self._epoch = epoch
        self._find_page, self._is_lost, self._hold_s, self._say = find_page, is_lost, hold_s, say
        self._clock, self._sleep = clock, sleep
        self._missing_since: float | None = None
        self._dead_since: float | None = None
        self._leaving_since: float | None = None
        self.waited_s = 0.0

    def wait_for_seal(self, wanted: tuple[int, int]) -> None:
        """Block while `wanted` is not sealed and a node is dead or silent.

        The wait lasts at most hold_s for a dead node and at most SUSPECT_S for a silent one.

        Args:
            wanted: The (epoch, version) whose seal ends the wait.
        """
        began = self._clock()
        while self._must_stay(wanted):
            self._sleep(_POLL_S)
        self.waited_s += self._clock() - began

    def is_leaving(self) -> bool:
        """Return whether the job is about to leave a node, for less than LEAVES_S so far.

        An agent lost meanwhile has most likely continued without the node, and the launcher is about to end this
        rank.
        """
        page = self._find_page()
        if page is None or not page.held or page.held < self._epoch:
            self._leaving_since = None
            return False
        now = self._clock()
        if self._leaving_since is None:
            self._leaving_since = now
        return now - self._leaving_since < LEAVES_S

    def stand_by(self) -> None:
        """Block while the job is about to leave a node (see `is_leaving`)."""
        began = self._clock()
        while self.is_leaving():
            self._sleep(_POLL_S)
        self.waited_s += self._clock() - began

    def _must_stay(self, wanted: tuple[int, int]) -> bool:
        page = self._find_page()
        if page is None or self._is_lost():
            return False
        if not page.is_stuck:
            self._missing_since = self._dead_since = None
            return False
        if page.sealed >= wanted:
            return False
        now, dead = self._clock(), page.dead_nodes
        if self._missing_since is None:
            self._missing_since = now
        if not dead:
            return now - self._missing_since < min(SUSPECT_S, self._hold_s)
        if self._dead_since is None:
            self._dead_since = now
            if self._hold_s:
                self._say(
                    f"{dead} of the job's nodes {'is' if dead == 1 else 'are'} dead, and version {wanted[1]} is not "
                    f"sealed: waiting up to {self._hold_s:g} s for Slurm before another step"
                )
        return now - self._dead_since < self._hold_s
