"""The checkpoint traffic of a training as lines of text, all ranks merged: ranges and worst values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gemini_hpc.durations import format_seconds

MAX_PROBLEMS_SHOWN = 3
_FITTED = ("gemini", "naive", "no_pipeline")
Row = dict[str, Any]


def format_traffic(ranks: Sequence[Row]) -> list[str]:
    """Return the lines for a training's `traffic` in the document; [] if no rank has reported any.

    The input must be sanitized (`sanitize`).
    """
    return [*_describe_network(ranks), _describe_traffic(ranks), *_list_trouble(ranks)] if ranks else []


def _describe_network(ranks: Sequence[Row]) -> list[str]:
    known = [r for r in ranks if r["iteration_s"] is not None and r["idle_s"] is not None]
    if not known:
        return []
    length = _format_range([r["iteration_s"] for r in known], format_seconds)
    spans = _format_range([r["spans"] for r in known], str)
    idle = _format_range([r["idle_s"] for r in known], format_seconds)
    deviations = [r["deviation"] for r in known if r["deviation"] is not None]
    deviation = f" (deviation {100 * max(deviations):.1f} %)" if deviations else ""
    text = (
        f"network: iteration {length}, {spans} idle span{'' if spans == '1' else 's'} of {idle} together{deviation}"
    )
    links = [r for r in ranks if r["bytes_per_s"]]
    if links:
        slowest = min(links, key=lambda r: float(r["bytes_per_s"]))
        text += f", {format_size(slowest['bytes_per_s'])}/s"
        if slowest["alpha_s"] is not None:
            text += f", {format_seconds(slowest['alpha_s'])}"
    return [text]


def _describe_traffic(ranks: Sequence[Row]) -> str:
    first = ranks[0]
    text = f"traffic: {first['scheme']}" + (f" over {first['transport']}" if first["transport"] else "") + ": "
    planned = [r for r in ranks if r["stage"] == "steady" and r["chunks"]]
    if first["scheme"] == "none":
        return text + "no version is saved"
    if first["transport"] == "none":
        text += f"nothing is sent (one replica); {_describe_frequency(first)}"
    elif first["scheme"] not in _FITTED:
        text += f"not fitted into idle spans; {_describe_frequency(first)}"
    elif not planned:
        stage = "the training is being profiled" if first["stage"] != "steady" else "no plan"
        text += f"{stage}; {_describe_frequency(first)}"
    else:
        text += f"{_describe_fit(planned)}; {_describe_frequency(planned[0])}"
    overheads = [r for r in ranks if r["overhead"] is not None]
    if overheads:
        worst = max(overheads, key=lambda r: float(r["overhead"]))
        text += f"; overhead {100 * worst['overhead']:.1f} %"
        if len(ranks) > 1:
            text += f" (rank {worst['rank']})"
        text += _describe_excess(worst)
    slowest = max((r["sealed_s"] for r in ranks if r["sealed_s"] is not None), default=None)
    text += f"; sealed {format_seconds(slowest)} after step()" if slowest is not None else ""
    waits = [r["waited_s"] for r in ranks if r["waited_s"] is not None]
    return text + (f", wait {format_seconds(max(waits))}" if waits else "")


def _describe_excess(r: Row) -> str:
    """Return the consequence of an overhead above its ceiling."""
    if r["ceiling"] is None or r["overhead"] <= r["ceiling"]:
        return ""
    if r["judged_in"]:
        when = f"within {r['judged_in']} iterations, or when the training waits for its copies"
        return f", above the ceiling of {100 * r['ceiling']:.2g} %: fewer saves are considered {when}"
    return f", above the ceiling of {100 * r['ceiling']:.2g} %: fewer versions will be saved"


def _describe_fit(planned: Sequence[Row]) -> str:
    chunks = _format_range([r["chunks"] for r in planned], str)
    spans = _format_range([sum(n > 0 for n in r["chunks_per_span"]) for r in planned], str)
    text = f"{chunks} chunk{'' if chunks == '1' else 's'} in {spans} span{'' if spans == '1' else 's'}, "
    worst = max(planned, key=lambda r: int(r["spilled_bytes"]))
    if not worst["spilled_bytes"]:
        return text + f"all of {format_size(max(r['total_bytes'] for r in planned))} fits"
    return text + f"{format_size(worst['fitting_bytes'])} of {format_size(worst['total_bytes'])} fit"


def _describe_frequency(r: Row) -> str:
    repeated = f"a failure repeats at most {r['repeated']} step{'' if r['repeated'] == 1 else 's'}"
    if r["j"] <= 1:
        return f"each version is saved, {repeated}"
    over = "" if r["s"] <= 1 else f", over {r['s']} iterations"
    return f"every {_format_ordinal(r['j'])} version is saved{over}: {repeated}"


def _list_trouble(ranks: Sequence[Row]) -> list[str]:
    found = []
    spilling = [r for r in ranks if r["stage"] == "steady" and r["spilled_bytes"]]
    if spilling:
        worst = max(spilling, key=lambda r: int(r["spilled_bytes"]))
        found.append(
            f"slow link: {format_size(worst['spilled_bytes'])} of each saved version of rank {worst['rank']} "
            f"find no idle span, the training waits {format_seconds(worst['late_s'])} for them"
        )
    reasons = sorted({r["reason"] for r in ranks if r["reason"]})
    found += [f"fewer versions: {reason}" for reason in reasons[:1]]
    passed = max(ranks, key=lambda r: int(r["unsealed"]))
    if count := passed["unsealed"]:
        found.append(
            f"late: {count} version{'' if count == 1 else 's'} of rank {passed['rank']} not sealed when the training "
            "went on after its longest wait"
        )
    problems: dict[str, int] = {}
    for r in ranks:
        if r["problem"]:
            problems.setdefault(r["problem"], r["rank"])
    found += [f"problem: rank {rank}: {text}" for text, rank in list(problems.items())[:MAX_PROBLEMS_SHOWN]]
    if len(problems) > MAX_PROBLEMS_SHOWN:
        found.append(f"problem: and {len(problems) - MAX_PROBLEMS_SHOWN} others")
    return found


def _format_range(values: Sequence[Any], text: Callable[[Any], str]) -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"


def _format_ordinal(n: int) -> str:
    return f"{n}{'th' if 10 <= n % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def format_size(n: float) -> str:
    """Return a size in the units of networks, powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.95:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
