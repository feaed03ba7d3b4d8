"""The chunk schedule for idle spans: Algorithm 2 of the GEMINI paper (SOSP '23, section 5.3).

The letters are those of the paper. Spans and replicas count from 0.

- T: idle spans in seconds.
- C: bytes of a checkpoint.
- m: replicas, the own copy included.
- R, p: bytes of buffer, and the number of parts that they are cut into.
- B: bytes per second.
- alpha: seconds to start a transfer.
- mu: share of a span that is planned with.

Three lines of the paper are corrected here:

- Line 17 subtracts f(remain_size) from the span; the chunk just placed uses f(size) instead.
- The loop of line 8 never ends if the rest of a span is at most alpha: no byte fits, and nothing changes any more.
  Here a span has ended when no byte fits.
- Line 21 counts the checkpoints from 0 up to m - 1, which are m checkpoints; the m - 1 of its input are sent.

Sizes are whole bytes, rounded down, so that a chunk is never longer than its place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple


class Partition(NamedTuple):
    """A chunk: the bytes offset..offset+size of the checkpoint, sent in T[span].

    The receiver is the holder `replica` + 1 places (0..m-2) after the home node.
    """

    span: int
    replica: int
    offset: int
    size: int


def compute_transfer_s(size: int, B: float, alpha: float) -> float:
    """Return f(s) = alpha + s/B: the duration of the transfer of one chunk."""
    return alpha + size / B


def compute_capacity(t: float, R: int, p: int, B: float, alpha: float, mu: float) -> int:
    """Return the bytes that Algorithm 2 places in a finite span of t seconds.

    All bytes are of one replica and do not run out.
    """
    _check(t, R, p, B, alpha, mu)
    chunk = R // p
    whole = int(mu * t / compute_transfer_s(chunk, B, alpha))
    return whole * chunk + min(chunk, _fit_bytes(mu * t - whole * compute_transfer_s(chunk, B, alpha), B, alpha))


def divide_checkpoint(
    T: Sequence[float], C: int, m: int, R: int, p: int, B: float, alpha: float, mu: float
) -> list[Partition]:
    """Return the chunks of Algorithm 2 in the order in which they are sent.

    The last span counts as infinite, so all chunks have a place. For m = 1 or C = 0 there is nothing to send.

    Raises:
        ValueError: There are no spans, or a span is no length (the last may be infinite). C < 0, m < 1, R < p or p <
            1. B, alpha or mu are out of their ranges: B > 0, alpha >= 0, 0 < mu <= 1.
    """
    _check_all(T, C, m, R, p, B, alpha, mu)
    partitions: list[Partition] = []
    chunk = R // p
    full_s = compute_transfer_s(chunk, B, alpha)
    replica, remain_size = 0, C
    if C == 0 or m == 1:
        return partitions
    last = len(T) - 1
    for span, t in enumerate(T):
        remain_span = inf if span == last else mu * t
        while True:
            room = chunk if remain_span >= full_s else min(chunk, _fit_bytes(remain_span, B, alpha))
            size = min(remain_size, room)
            if size == 0:
                break
            partitions.append(Partition(span, replica, C - remain_size, size))
            remain_span -= compute_transfer_s(size, B, alpha)
            remain_size -= size
            if remain_size == 0:
                replica, remain_size = replica + 1, C
                if replica == m - 1:
                    return partitions
            elif room < chunk:
                break  # only rounding remains of this span
    return partitions


@dataclass(frozen=True, slots=True)
class Plan:
    """The partitions of Algorithm 2, and their effect on the training.

    Attributes:
        partitions: Partitions in the order of sending. Their spans never decrease.
        spans: Number of spans.
        total_bytes: Bytes sent to all m - 1 holders.
        spilled_bytes: Bytes that the last span takes beyond its true length (times mu).
        late_s: Seconds by which these bytes delay the training.
    """

    partitions: tuple[Partition, ...]
    spans: int
    total_bytes: int
    spilled_bytes: int
    late_s: float

    @property
    def fits(self) -> bool:
        """Return whether the idle spans take everything."""
        return self.spilled_bytes == 0

    @property
    def fitting_bytes(self) -> int:
        """Return the bytes that the idle spans take."""
        return self.total_bytes - self.spilled_bytes

    def list_chunks(self, span: int) -> tuple[Partition, ...]:
        """Return the chunks of one span, in order.

        Raises:
            ValueError: There is no such span.
        """
        return self.partitions[self._count_before(span) : self.count_due(span)]

    def count_due(self, span: int) -> int:
        """Return how many partitions, from the first, may have been sent by the end of a span.

        A sender that processes them in order uses this number as its limit.

        Raises:
            ValueError: There is no such span.
        """
        self._count_before(span)
        return bisect_right(self.partitions, span, key=_read_span)

    def _count_before(self, span: int) -> int:
        if not 0 <= span < self.spans:
            raise ValueError(f"span {span} is outside 0..{self.spans - 1}")
        return bisect_left(self.partitions, span, key=_read_span)


def plan_chunks(T: Sequence[float], C: int, m: int, R: int, p: int, B: float, alpha: float, mu: float) -> Plan:
    """Return `divide_checkpoint` with the bytes that the true length of the last span cannot take.

    Raises:
        ValueError: See `divide_checkpoint`.
    """
    partitions = divide_checkpoint(T, C, m, R, p, B, alpha, mu)
    last = len(T) - 1
    remain_span = mu * T[-1]
    spilled_bytes = 0
    late_s = 0.0
    for part in partitions[bisect_left(partitions, last, key=_read_span) :]:
        took_s = compute_transfer_s(part.size, B, alpha)
        if took_s > remain_span:
            spilled_bytes += part.size - min(part.size, _fit_bytes(remain_span, B, alpha))
            late_s += took_s - max(0.0, remain_span)
            remain_span = 0.0
        else:
            remain_span -= took_s
    return Plan(tuple(partitions), len(T), C * (m - 1), spilled_bytes, late_s if spilled_bytes else 0.0)


def _read_span(part: Partition) -> int:
    return part.span


def _fit_bytes(remain_span: float, B: float, alpha: float) -> int:
    return max(0, int((remain_span - alpha) * B))


def _check_all(T: Sequence[float], C: int, m: int, R: int, p: int, B: float, alpha: float, mu: float) -> None:
    if not T:
        raise ValueError("no idle spans: at least the last one, before the optimizer step, is needed")
    for span, t in enumerate(T):
        if not t >= 0 or (t == inf and span < len(T) - 1):
            raise ValueError(f"idle span {span} is {t} s long: a length is finite and not negative")
    if C < 0:
        raise ValueError(f"a checkpoint of {C} bytes: a size is not negative")
    if m < 1:
        raise ValueError(f"{m} replicas asked for: at least 1 (the node's own copy) is needed")
    _check(0.0, R, p, B, alpha, mu)


def _check(t: float, R: int, p: int, B: float, alpha: float, mu: float) -> None:
    if not (t >= 0 and isfinite(t)):
        raise ValueError(f"an idle span of {t} s: a length is finite and not negative")
    if p < 1:
        raise ValueError(f"{p} buffer parts: at least 1 is needed")
    if p > R:
        raise ValueError(f"{R} bytes of buffer in {p} parts: each part needs at least 1 byte")
    if not (B > 0 and isfinite(B)):
        raise ValueError(f"a bandwidth of {B} bytes per second: more than 0 is needed")
    if not (alpha >= 0 and isfinite(alpha)):
        raise ValueError(f"a start-up time of {alpha} s: 0 or more is needed")
    if not 0 < mu <= 1:
        raise ValueError(f"mu is {mu}: a share of a span is above 0 and at most 1")
