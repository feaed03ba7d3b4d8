"""A link between two agents that exists only as arithmetic: the sending end of one with a fixed rate.

It does what an agent does with grants (`gemini_hpc.agent.transfer.push_sender`), at the times of any clock, and
without a thread: what happened in the meantime is worked out whenever somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gemini_hpc.wire.grant_page import Grant, Spell

_UNDER_WAY = 2  # steps that are under way at a time


class ModelLink:
    """One version after another, each from `begin` to `all_arrives_at`."""

    def __init__(self, clock: Callable[[], float], rate: float, alpha_s: float, step_bytes: int) -> None:
        self._clock, self._alpha_s, self._step_bytes = clock, alpha_s, step_bytes
        self.rate = rate
        self.chunks: list[tuple[float, float, int]] = []  # (sent, arrives, bytes)
        self._under_way: deque[tuple[float, int]] = deque()  # (arrives, bytes)
        self._grant, self._total = Grant(0, 0.0, rate), 0
        self._sent = self._arrived = self._spell_from = 0
        self._now = self._free_at = self._spell_at = self.moved_at = 0.0
        self._spells: list[Spell] = []

    def begin(self, total: int) -> None:
        """Prepare for a version of so many bytes."""
        self._grant, self._total = Grant(0, 0.0, self.rate), total
        self._sent = self._arrived = self._spell_from = 0
        self._now = self._clock()

    def all_arrives_at(self) -> float:
        """Send what is left at once. Return when all of it will have arrived."""
        self._advance()
        while self._sent < self._total:
            self._put(min(self._step_bytes, self._total - self._sent))
        return self._under_way[-1][0] if self._under_way else self._now

    def grant(self, grant: Grant) -> None:
        """Replace the grant."""
        self._advance()
        self._grant = grant
        self._advance()

    def withdraw(self) -> None:
        """End the grant."""
        self._advance()
        self._grant = self._grant._replace(before=0.0)

    def check(self) -> None:
        """Nothing is ever lost."""

    @property
    def sent(self) -> int:
        """Bytes of the version that have been sent."""
        self._advance()
        return self._sent

    @property
    def arrived(self) -> int:
        """Bytes of the version that have arrived."""
        self._advance()
        return self._arrived

    def read_spells(self) -> list[Spell]:
        """The times in which bytes were under way, since the last call."""
        self._advance()
        found, self._spells = self._spells, []
        return found

    def _advance(self) -> None:
        now = self._clock()
        while True:
            while self._under_way and self._under_way[0][0] <= self._now:
                self._land(*self._under_way.popleft())
            room = self._grant.compute_room(self._sent, self._sent - self._arrived, self._now)
            if room and len(self._under_way) < _UNDER_WAY:
                self._put(min(room, self._step_bytes))
            elif self._under_way and self._under_way[0][0] <= now:
                self._now = self._under_way[0][0]
            else:
                self._now = now
                return

    def _put(self, size: int) -> None:
        if self._sent == self._arrived:
            self._spell_from, self._spell_at = self._sent, self._now
        self._free_at = max(self._free_at, self._now) + self._alpha_s + size / self.rate
        self.chunks.append((self._now, self._free_at, size))
        self._under_way.append((self._free_at, size))
        self._sent += size
        self.moved_at = self._now

    def _land(self, at: float, size: int) -> None:
        self._arrived += size
        self.moved_at = at
        if self._arrived == self._sent:
            self._spells.append(Spell(self._sent - self._spell_from, self._spell_at, at))
