"""The history of a job as lines of text: its end, its recoveries, its last events."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from gemini_hpc.durations import format_age, format_time
from gemini_hpc.report.columns import fold

Document = dict[str, Any]
MAX_LAST = 12
_MOMENTS = (("began", ""), ("fetched", "fetched"), ("loaded", "loaded"))


def format_end(d: Document, columns: int) -> list[str]:
    """Return how a job ended, the last sealed version, and its last events; [] for a job that has not ended."""
    how = d.get("ended")
    if how is None:
        return []
    when = f" at {format_time(how['t'])}, {format_age(d['t'] - how['t'])} ago" if how["t"] else ""
    code = f", exit code {how['exit_code']}" if how["exit_code"] else ""
    sealed = f"last sealed version: {how['version']}" if how["version"] else "no sealed version is known"
    if how["stored"]:
        sealed += f"; on the tier: version {how['stored']}"
    elif how["version"]:
        sealed += "; none on a tier: it was in the memory of the job's nodes"
    lines = fold(f"ended as {how['state']}{code}{when}", columns, "    ", "  ")
    lines += fold(sealed, columns, "    ", "  ")
    completed = sum(r["completed"] for r in d["recoveries"])
    begun = len(d["recoveries"]) - completed
    lines += fold(
        f"recoveries: {completed or 'none'}{f', {begun} not completed' * (begun > 0)}", columns, "    ", "  "
    )
    last = d["events"][-MAX_LAST:]
    if last:
        lines.append(f"last events (--json has all {len(d['events'])})" if len(d["events"]) > MAX_LAST else "events")
    for e in last:
        lines += fold(_format_event(e), columns, " " * 23, f"  {format_time(e['t'])}  ")
    return lines


def format_recovery(r: Document, columns: int) -> list[str]:
    """Return the timeline of one recovery."""
    lines = [format_headline(r)]
    for e in r["events"]:
        lines += fold(_format_event(e), columns, " " * 23, f"  +{e['after_s']:7.3f}  (+{e['gap_s']:.3f})  ")
    return lines


def format_headline(r: Document) -> str:
    """Return a recovery in one line."""
    open_ = "" if r["completed"] else ", not completed"
    return f"recovery of restart {r['restart']} at {format_time(r['began'])}, {r['total_s']:.1f} s{open_}"


def _format_event(e: Document) -> str:
    detail = format_detail(e)
    return " ".join(filter(None, (e["name"], e["host"]))) + (f": {detail}" if detail else "")


def format_detail(e: Document) -> str:
    """Return an event's detail for people.

    The detail of a rank's `resumed` is JSON, which the job's user may have written.
    """
    text = str(e["detail"])
    if not text.startswith("{"):
        return text
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return "(not readable)"
    # limits the size of the text, since an integer may have hundreds of digits
    numbers = {
        k: v for k, v in fields.items() if isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e15
    }
    words = [f"rank {numbers['rank']:.0f}"] if "rank" in numbers else []
    for (before, _), (after, word) in pairwise(_MOMENTS):
        if before in numbers and after in numbers:
            words.append(f"{word} in {numbers[after] - numbers[before]:.2f} s")
    if "shards" in numbers:
        words.append(f"{numbers['shards']:.0f} shard{'' if numbers['shards'] == 1 else 's'}")
    return ", ".join(words)
