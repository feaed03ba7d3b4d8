"""Ranges of bytes in a slot: (start, end) each, in order, without overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Range = tuple[int, int]
MOST = 64  # in one message


def merged(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """In order, and as few as they can be. gap: bytes between two of them that may be taken along."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def largest(ranges: Sequence[Range], most: int = MOST) -> list[Range]:
    """In order, those with the most bytes."""
    if len(ranges) <= most:
        return list(ranges)
    return sorted(sorted(ranges, key=lambda r: r[0] - r[1])[:most])


def size(ranges: Iterable[Range]) -> int:
    """Their bytes."""
    return sum(end - start for start, end in ranges)


def between(ranges: Sequence[Range], end: int) -> Iterator[Range]:
    """What they leave of the bytes from 0 to `end`."""
    at = 0
    for start, stop in ranges:
        if start > at:
            yield at, min(start, end)
        at = max(at, stop)
        if at >= end:
            return
    if at < end:
        yield at, end


def fault(ranges: Sequence[Range], end: int) -> str:
    """Why these, which somebody has sent, are no ranges within `end` bytes; "" if they are."""
    if len(ranges) > MOST:
        return f"{len(ranges)} ranges of bytes in one message"
    at = 0
    for start, stop in ranges:
        if not at <= start < stop <= end:
            return f"bytes {start} to {stop} after {at} of {end}"
        at = stop
    return ""
