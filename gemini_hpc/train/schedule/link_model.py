"""Model of a link of the job, f(s) = alpha + s/B (GEMINI section 5.3), measured on the job's own chunks."""

from __future__ import annotations

from collections import deque
from statistics import median

_PROBE_BYTES = 16 << 10  # a busy period of at most this many bytes measures alpha
_RATE_BYTES = 64 << 10  # a busy period of at least this many bytes measures B
# The least share of a busy period that counts as sending. A probe that queues behind another rank's copies measures
# too large an alpha. Short periods would then yield a B that the link does not have.
_LEAST_SHARE = 0.8
_KEPT = 64
_ENOUGH = 2
_SHORT = 0.25  # times the median period in bytes; shorter periods are bursts of some queue and are ignored
_LONG = 4  # times the median period: the most weight of one, as a late version's rest is sent in one long period


class LinkMeter:
    """The measured B and alpha of a link.

    The meter measures busy periods: from a chunk that is sent while none is in flight until none is in flight again.
    Single chunks are less reliable, because acknowledgements arrive in bunches.

    Training traffic at the same time makes a period look slower. B is therefore taken from the faster part of the
    periods, each weighted by its bytes. Periods known to overlap training traffic count only while there are too few
    others.
    """

    def __init__(self) -> None:
        self._periods: deque[tuple[float, int]] = deque(maxlen=_KEPT)  # (bytes per second, bytes)
        self._shared: deque[tuple[float, int]] = deque(maxlen=_KEPT)  # the same, overlapping training traffic
        self._alphas: deque[float] = deque(maxlen=_KEPT)
        self._under_way = 0
        self._began = 0.0
        self._bytes = 0
        self._beside = False

    def seed(self, B: float, alpha: float) -> None:
        """Start with values that were measured earlier; new measurements soon outweigh them."""
        self._alphas.append(alpha)
        self._periods += [(B, _RATE_BYTES)] * _ENOUGH

    def record_send(self, time_s: float, *, shared: bool = False) -> None:
        """Record that a chunk is sent.

        Args:
            time_s: Time in seconds, by the same clock as in `record_ack`.
            shared: Whether the training has traffic in flight.
        """
        if self._under_way == 0:
            self._began, self._bytes, self._beside = time_s, 0, False
        self._beside = self._beside or shared
        self._under_way += 1

    def record_ack(self, size: int, time_s: float) -> None:
        """Record that a chunk of `size` bytes was acknowledged."""
        self._under_way -= 1
        self._bytes += size
        if self._under_way == 0:
            self._record_transfer(self._bytes, time_s - self._began, self._beside)

    def record_spell(self, size: int, took_s: float, *, beside: bool = False) -> None:
        """Record a busy period of `size` bytes that another process has measured; see `record_send`."""
        self._record_transfer(size, took_s, beside)

    def record_loss(self) -> None:
        """Record that a chunk will never be acknowledged, and discard the period's bytes so far."""
        self._under_way -= 1
        self._bytes = 0

    def _record_transfer(self, size: int, took_s: float, beside: bool) -> None:
        if size <= 0 or took_s <= 0:
            return
        if size <= _PROBE_BYTES:
            self._alphas.append(took_s)
        elif size >= _RATE_BYTES:
            rate = size / max(took_s - self.alpha, _LEAST_SHARE * took_s)
            (self._shared if beside else self._periods).append((rate, size))

    @property
    def _seen(self) -> list[tuple[float, int]]:
        return list(self._periods if len(self._periods) >= _ENOUGH else (*self._periods, *self._shared))

    @property
    def known(self) -> bool:
        """Return whether there are enough measurements for a plan."""
        return len(self._seen) >= _ENOUGH

    @property
    def alpha(self) -> float:
        """Return the startup time of a chunk in seconds; 0 before it is measured."""
        return min(self._alphas, default=0.0)

    @property
    def B(self) -> float:
        """Return the rate in bytes per second; 0 before it is measured."""
        seen = self._seen
        if not seen:
            return 0.0
        usual = median(size for _, size in seen)
        periods = sorted((rate, min(size, _LONG * usual)) for rate, size in seen if size >= _SHORT * usual)
        left = 0.6 * sum(size for _, size in periods)
        for rate, size in periods:
            left -= size
            if left <= 0:
                return rate
        return 0.0
