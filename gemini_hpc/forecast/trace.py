"""Failures from a trace, instead of a distribution: a line for each moment at which nodes failed.

    # seconds  nodes   kind
    3600       12      hardware
    7210.5     4-7,9   software

Seconds count from the training's start, nodes are node ranks from 0. The lines may be in any order; `#` begins a
comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gemini_hpc.clock import DAY_S
from gemini_hpc.forecast.simulation import NodeFailure

MOST_FAILURES = 1_000_000
MOST_S = 3650 * DAY_S  # ten years: a larger number is a mistake
KINDS = {"hardware": True, "software": False}
_TIME = re.compile(r"[0-9]{1,12}(\.[0-9]{0,9})?")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class TraceError(ValueError):
    """Raised for a line that is no failure. The message names the line, what was wanted and what was found."""


def parse(lines: Iterable[str], nodes: int) -> list[NodeFailure]:
    """Return the failures in the order of time. The failures of one line happen at the same moment.

    Raises:
        TraceError: A line is no failure, or there are no failures.
    """
    found: list[NodeFailure] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            found += _parse_failures(words, nodes, MOST_FAILURES - len(found))
        except ValueError as error:
            raise TraceError(f"line {number}: {error}") from None
    if not found:
        raise TraceError("no failures in it: wanted lines such as '3600 4-7,9 hardware'")
    return sorted(found, key=lambda failure: failure.at_s)


def _parse_failures(words: list[str], nodes: int, most: int) -> Iterator[NodeFailure]:
    if len(words) != 3:
        raise ValueError(f"wanted seconds, nodes and a kind, found {len(words)} word{'s' * (len(words) != 1)}")
    at, ranks, kind = words
    if not _TIME.fullmatch(at) or float(at) > MOST_S:
        raise ValueError(f"wanted seconds from 0 to {MOST_S:.0f}, found {at[:40]!r}")
    if kind not in KINDS:
        raise ValueError(f"wanted hardware or software, found {kind[:40]!r}")
    for part in ranks.split(","):
        ends = _RANGE.fullmatch(part)
        if not ends or not int(ends[1]) <= int(ends[2] or ends[1]) < nodes:
            raise ValueError(f"wanted node ranks from 0 to {nodes - 1} such as 4-7,9, found {part[:40]!r}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        most -= last - first + 1
        if most < 0:
            raise ValueError(f"more than {MOST_FAILURES} failures")
        yield from (NodeFailure(float(at), node, KINDS[kind]) for node in range(first, last + 1))
