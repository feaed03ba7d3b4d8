"""What a link of the job can do, measured on the job's own chunks: f(s) = alpha + s/B (GEMINI paper, section 5.3)."""

from __future__ import annotations

from collections import deque
from statistics import median

_PROBE_BYTES = 16 << 10  # a chunk up to here, alone on its way, shows alpha
_RATE_BYTES = 64 << 10  # a busy period from here on shows B
# Of a busy period what counts as sending at least. A probe that had to pass another rank's copies shows an alpha that
# is too large, and short periods would then show a B that the link does not have.
_LEAST_SHARE = 0.8
_KEPT = 64
_ENOUGH = 2
_SHORT = 0.25  # of the usual period; shorter ones are bursts of some queue
_LONG = 4  # usual periods: no period counts for more. The rest of a late version, sent in one go, is one among many


class LinkMeter:
    """B and alpha from busy periods: from a chunk that is sent when none is on its way until none is again. Single
    chunks tell less: acknowledgements come in bunches. Training traffic in the same moment makes a period look
    slower, so B is taken from the faster part of what was seen, each period counting by its bytes; those known to
    have had any count only while there are no others."""

    def __init__(self) -> None:
        self._periods: deque[tuple[float, int]] = deque(maxlen=_KEPT)  # (bytes per second, bytes)
        self._shared: deque[tuple[float, int]] = deque(maxlen=_KEPT)  # the same, beside the training's traffic
        self._alphas: deque[float] = deque(maxlen=_KEPT)
        self._under_way = 0
        self._began = 0.0
        self._bytes = 0
        self._beside = False

    def seed(self, B: float, alpha: float) -> None:
        """What the link could do earlier; what is seen outweighs it soon."""
        self._alphas.append(alpha)
        self._periods += [(B, _RATE_BYTES)] * _ENOUGH

    def sent(self, at: float, *, beside: bool = False) -> None:
        """A chunk goes out; beside: the training has traffic. Times in seconds of one clock."""
        if self._under_way == 0:
            self._began, self._bytes, self._beside = at, 0, False
        self._beside = self._beside or beside
        self._under_way += 1

    def landed(self, size: int, at: float) -> None:
        """A chunk of `size` bytes was acknowledged."""
        self._under_way -= 1
        self._bytes += size
        if self._under_way == 0:
            self._over(at - self._began)

    def lost(self) -> None:
        """A chunk will never be acknowledged; the period tells nothing."""
        self._under_way -= 1
        self._bytes = 0

    def _over(self, took_s: float) -> None:
        if self._bytes <= 0 or took_s <= 0:
            return
        if self._bytes <= _PROBE_BYTES:
            self._alphas.append(took_s)
        elif self._bytes >= _RATE_BYTES:
            rate = self._bytes / max(took_s - self.alpha, _LEAST_SHARE * took_s)
            (self._shared if self._beside else self._periods).append((rate, self._bytes))

    @property
    def _seen(self) -> list[tuple[float, int]]:
        return list(self._periods if len(self._periods) >= _ENOUGH else (*self._periods, *self._shared))

    @property
    def known(self) -> bool:
        """Whether enough was seen for a plan."""
        return len(self._seen) >= _ENOUGH

    @property
    def alpha(self) -> float:
        """Startup time of a chunk, seconds; 0 before it was seen."""
        return min(self._alphas, default=0.0)

    @property
    def B(self) -> float:
        """Bytes per second; 0 before it was seen."""
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
