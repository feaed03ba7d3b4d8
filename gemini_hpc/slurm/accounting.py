"""History of past jobs from Slurm's accounting, parsed from the output of `sacct` (pure functions)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gemini_hpc.slurm.text import ParseError

COLUMNS = ("JobIDRaw", "State", "NNodes", "ElapsedRaw")
# -D: print a row for each run of a job that was requeued after a loss
ARGUMENTS = ("-a", "-X", "-D", "-P", "--noconvert", "-o", ",".join(COLUMNS))
COMMAND = f"sacct {' '.join(ARGUMENTS)} -S now-90days"
_COUNT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([KM]?)")
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6}


@dataclass(frozen=True, slots=True)
class History:
    """Totals over past jobs.

    `runs` counts runs that had nodes. `node_days` is their node time in days. `lost` counts runs that ended
    as NODE_FAIL.
    """

    runs: int = 0
    node_days: float = 0.0
    lost: int = 0


def parse_history(lines: Iterable[str]) -> History:
    """Return the totals of the rows below a header that has `COLUMNS`, in any order and among others.

    Rows of steps are ignored. Raises `ParseError`, which names the line.
    """
    places: dict[str, int] = {}
    runs, node_s, lost = 0, 0.0, 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        cells = line.strip().split("|")
        if not places:
            found = {cell.casefold(): at for at, cell in enumerate(cells)}
            missing = [name for name in COLUMNS if name.casefold() not in found]
            if missing:
                raise ParseError(f"line {number}: no column {', '.join(missing)}: wanted what `{COMMAND}` prints")
            places = {name: found[name.casefold()] for name in COLUMNS}
            continue
        if len(cells) <= max(places.values()):
            raise ParseError(f"line {number}: {len(cells)} columns, fewer than the header has")
        job, state, nodes, elapsed = (cells[places[name]] for name in COLUMNS)
        if not re.fullmatch(r"[0-9]{1,10}(\.[A-Za-z0-9+]{1,20})?", job):
            raise ParseError(f"line {number}: {job[:40]!r} is no raw job id")
        if "." in job:
            continue
        count, seconds = _parse_count(nodes), _parse_count(elapsed)
        if count is None or seconds is None:
            raise ParseError(f"line {number}: {nodes[:40]!r} nodes for {elapsed[:40]!r} seconds")
        if count and seconds:
            runs, node_s = runs + 1, node_s + count * seconds
            lost += state.startswith("NODE_FAIL")
    if not places:
        raise ParseError(f"it is empty: wanted what `{COMMAND}` prints")
    return History(runs, node_s / 86400, lost)


def _parse_count(text: str) -> float | None:
    """Return the value of a count such as `3072`, or `3.07K` from releases that shorten numbers."""
    match = _COUNT.fullmatch(text)
    return float(match[1]) * _UNITS[match[2]] if match else None
