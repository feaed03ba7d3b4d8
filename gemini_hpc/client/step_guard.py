"""Not completing a step that a node's death would have repeated, or that the job's leaving a node would repeat.

When a node dies after an iteration's last collective, the survivors can still complete its optimizer step, and only
the next collective stops them. Where the version before that step is not sealed, the job comes back one version
earlier, and has two steps to repeat. So a training stops before such a step while the agents say that a node is dead,
or have to find out: it ends anyway, as soon as Slurm knows.

A job leaves a node on purpose right after a seal. The root has told all agents before (`wire.peer.HoldDown`), so no
rank sees that seal without the word that it is the last one here, and none makes another step.
"""

from __future__ import annotations

from collections.abc import Callable

from gemini_hpc import clock
from gemini_hpc.wire.control_page import STATE_DEGRADED, STATE_FROZEN, ControlPage

LEAVES_S = 10.0  # longer than agents keep ranks from going on
SUSPECT_S = 3.0  # longer than the agents take to find out whether a silent node is dead
_POLL_S = 0.005


class StepGuard:
    """Of one rank. Once for each time that nodes are missing: when that has cost as much as it may, training goes on,
    until all are there again."""

    def __init__(
        self,
        page: Callable[[], ControlPage | None],
        lost: Callable[[], bool],
        hold_s: float,
        say: Callable[[str], None],
        epoch: int,
        *,
        clock: Callable[[], float] = clock.monotonic,
        sleep: Callable[[float], None] = clock.sleep,
    ) -> None:
        """page: the agent's; lost: whether it is gone, which says nothing of other nodes; hold_s: longest wait for a
        dead node's job to end; epoch: the rank's, not 0."""
        self._epoch = epoch
        self._page, self._lost, self._hold_s, self._say = page, lost, hold_s, say
        self._clock, self._sleep = clock, sleep
        self._missing_since: float | None = None
        self._dead_since: float | None = None
        self._leaving_since: float | None = None
        self.waited_s = 0.0

    def hold(self, wanted: tuple[int, int]) -> None:
        """Block while (epoch, version) `wanted` is not sealed and a node is dead (at most hold_s) or silent (at most
        SUSPECT_S)."""
        began = self._clock()
        while self._stays(wanted):
            self._sleep(_POLL_S)
        self.waited_s += self._clock() - began

    def leaving(self) -> bool:
        """Whether the job is about to leave a node, and that has been waited for less than LEAVES_S. An agent that is
        lost meanwhile has most likely gone on without the node, and the launcher is about to end this rank."""
        page = self._page()
        if page is None or not page.held or page.held < self._epoch:
            self._leaving_since = None
            return False
        now = self._clock()
        if self._leaving_since is None:
            self._leaving_since = now
        return now - self._leaving_since < LEAVES_S

    def stand_by(self) -> None:
        """Block while it is."""
        began = self._clock()
        while self.leaving():
            self._sleep(_POLL_S)
        self.waited_s += self._clock() - began

    def _stays(self, wanted: tuple[int, int]) -> bool:
        page = self._page()
        if page is None or self._lost():
            return False
        dead = page.dead_nodes
        if not dead and page.state not in (STATE_FROZEN, STATE_DEGRADED):
            self._missing_since = self._dead_since = None
            return False
        if page.sealed >= wanted:
            return False
        now = self._clock()
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
