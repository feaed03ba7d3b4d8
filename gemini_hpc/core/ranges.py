"""Ranges of bytes in a slot: (start, end) each, in order, without overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

Range = tuple[int, int]
Number = TypeVar("Number", int, float)
MOST = 64  # most ranges in one message


def merge_ranges(ranges: Iterable[tuple[Number, Number]], gap: int = 0) -> list[tuple[Number, Number]]:
    """Return the ranges, of bytes or of time, in order and as few as possible.

    `gap` is the number of bytes between two ranges that may be included.
    """
    found: list[tuple[Number, Number]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def choose_largest(ranges: Sequence[Range], most: int = MOST) -> list[Range]:
    """Return the ranges with the most bytes, in order."""
    if len(ranges) <= most:
        return list(ranges)
    return sorted(sorted(ranges, key=lambda r: r[0] - r[1])[:most])


def count_bytes(ranges: Iterable[Range]) -> int:
    """Return the number of bytes in the ranges."""
    return sum(end - start for start, end in ranges)


def list_gaps(ranges: Sequence[Range], end: int) -> Iterator[Range]:
    """Yield the ranges of the bytes from 0 to `end` that these ranges leave."""
    at = 0
    for start, stop in ranges:
        if start > at:
            yield at, min(start, end)
        at = max(at, stop)
        if at >= end:
            return
    if at < end:
        yield at, end


def find_fault(ranges: Sequence[Range], end: int) -> str:
    """Return why these received ranges are not valid within `end` bytes; "" if they are."""
    if len(ranges) > MOST:
        return f"{len(ranges)} ranges of bytes in one message"
    at = 0
    for start, stop in ranges:
        if not at <= start < stop <= end:
            return f"bytes {start} to {stop} after {at} of {end}"
        at = stop
    return ""
