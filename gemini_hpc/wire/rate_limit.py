"""How often something may happen that a stranger can cause: log lines above all."""

from __future__ import annotations

from gemini_hpc import clock


class RateLimit:
    """A token bucket: `take` is true for `burst` events at once and `per_s` events a second in the long run.

    `missed` counts the refusals since the last event that was let through.
    """

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._at = burst, clock.monotonic()
        self.missed = 0

    def take(self, count: float = 1.0) -> bool:
        """Whether one more, or `count` more, may happen now."""
        self._fill()
        if self._tokens < count:
            self.missed += 1
            return False
        self._tokens -= count
        return True

    @property
    def full(self) -> bool:
        """Whether nothing has been taken for so long that it makes no difference any more."""
        self._fill()
        return self._tokens >= self._burst

    def _fill(self) -> None:
        now = clock.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now

    def settle(self) -> int:
        """The number missed so far, which is then counted anew."""
        missed, self.missed = self.missed, 0
        return missed
