"""A rate limit for events that a stranger can cause, log lines above all."""

from __future__ import annotations

from gemini_hpc import clock


class RateLimit:
    """A token bucket that permits `burst` events at once and `per_s` events a second in the long run.

    Attributes:
        missed: Number of refusals since the last `take_missed`.
    """

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._updated = burst, clock.monotonic()
        self.missed = 0

    def take_tokens(self, count: float = 1.0) -> bool:
        """Return whether `count` more events may happen now, and count them."""
        self._fill()
        if self._tokens < count:
            self.missed += 1
            return False
        self._tokens -= count
        return True

    @property
    def full(self) -> bool:
        """Return whether the bucket is full, so that earlier events no longer matter."""
        self._fill()
        return self._tokens >= self._burst

    def _fill(self) -> None:
        now = clock.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._per_s)
        self._updated = now

    def take_missed(self) -> int:
        """Return the number of refusals so far and reset it."""
        missed, self.missed = self.missed, 0
        return missed
