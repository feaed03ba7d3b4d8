"""What a benchmark found: one row a figure, printed as a table and kept in a JSON file."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WHAT_COLUMNS = 64


@dataclass(frozen=True)
class Row:
    """A figure. `runs`: its value in each run; `value`: their median unless said otherwise. `limit`: the bar, a
    least value where `at_least`; `goal`: what we want beyond it. `peers`: the same measure of others in the same
    run, by name; `ratio`: value against the baseline among them."""

    id: str
    what: str
    unit: str
    value: float
    runs: tuple[float, ...] = ()
    limit: float | None = None
    goal: float | None = None
    at_least: bool = False
    peers: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None

    @property
    def family(self) -> str:
        """The part of the id before its dot."""
        return self.id.partition(".")[0]

    @property
    def ok(self) -> bool | None:
        """Whether the bar is kept; None where there is none."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_json(self) -> dict[str, Any]:
        """The row in the file."""
        return {
            "id": self.id,
            "what": self.what,
            "unit": self.unit,
            "value": _rounded(self.value),
            "limit": self.limit,
            "goal": self.goal,
            "ok": self.ok,
            "peers": {name: _rounded(value) for name, value in self.peers.items()},
            "ratio": None if self.ratio is None else _rounded(self.ratio),
            "runs": [_rounded(value) for value in self.runs],
        }


def median_row(
    id: str,
    what: str,
    unit: str,
    runs: Sequence[float],
    *,
    limit: float | None = None,
    goal: float | None = None,
    at_least: bool = False,
    peers: dict[str, float] | None = None,
    baseline: str = "",
) -> Row:
    """A row whose value is the median of its runs; `baseline` names the peer that `ratio` is against."""
    value, others = statistics.median(runs), peers or {}
    ratio = value / others[baseline] if others.get(baseline) else None
    return Row(id, what, unit, value, tuple(runs), limit, goal, at_least, others, ratio)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _limit(row: Row) -> str:
    if row.limit is None:
        return "-"
    text = f"{'>=' if row.at_least else '<='} {_number(row.limit)}"
    return text if row.goal is None else f"{text} (goal {_number(row.goal)})"


def _runs(row: Row) -> str:
    if len(row.runs) < 2:
        return str(len(row.runs) or "-")
    return f"{len(row.runs)}: {_number(min(row.runs))}..{_number(max(row.runs))}"


def table(rows: Iterable[Row]) -> str:
    """The rows for people; under each the peers that were measured beside it."""
    head = ("id", "what", "value", "unit", "limit", "", "runs")
    lines = [head]
    for row in rows:
        first, *more = textwrap.wrap(row.what, _WHAT_COLUMNS)
        verdict = {True: "ok", False: "OVER", None: ""}[row.ok]
        lines.append((row.id, first, _number(row.value), row.unit, _limit(row), verdict, _runs(row)))
        lines += [("", text, "", "", "", "", "") for text in more]
        lines += [("", f"    {name}", _number(value), row.unit, "", "", "") for name, value in row.peers.items()]
        if row.ratio is not None:
            lines.append(("", "    ratio to the baseline", _number(row.ratio), "x", "", "", ""))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i == 2 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def store(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows; those of other families that are already in the file stay."""
    families = {row.family for row in rows}
    kept: list[dict[str, Any]] = []
    if path.exists():
        kept = [old for old in json.loads(path.read_text()) if old["id"].partition(".")[0] not in families]
    found = kept + [row.as_json() for row in rows]
    path.write_text(json.dumps(found, indent=1) + "\n")
