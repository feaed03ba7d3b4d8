"""A job as text: its state, the losses that it would survive, what its owner should do, its end, its recoveries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from gemini_hpc.durations import format_age, format_time
from gemini_hpc.report.columns import fold

Document = dict[str, Any]
MAX_HOSTS_SHOWN = 4
MAX_LAST = 12
_MOMENTS = (("began", ""), ("fetched", "fetched"), ("loaded", "loaded"))
_WAITING = ("PENDING", "CONFIGURING", "COMPLETING")


def format_summary(d: Document, width: int) -> list[str]:
    """Return the lines for a document of `inspect`, folded to `width` columns."""
    from gemini_hpc.query.inspect_document import format_protected_count

    slurm = d["slurm"]
    reason = f" ({slurm['reason']})" if slurm.get("reason") and slurm["reason"] != "None" else ""
    state = f"{d['state']} {format_protected_count(d)}".rstrip()
    head = f"job {d['job']}: {state}   slurm {slurm.get('state') or '?'}{reason}"
    facts = [f"restarts {slurm.get('restarts', d['restart'])}", *_describe_copies(d)]
    if d["asked"] == "agents":
        facts.append("(asked: agents)")
    whole = "   ".join([head, *facts])
    lines = [whole] if len(whole) <= width else [*fold(head, width, "    ", ""), "    " + "   ".join(facts)]
    if d["ended"] is None:
        lines += fold(describe_possible_losses(d), width, "    ", "may be lost: ")
    return lines + fold(choose_advice(d), width, "    ", "to do: ")


def _describe_copies(d: Document) -> list[str]:
    if not d["replicas"]:
        return []
    if not (lost := d.get("parity")):
        return [f"{d['replicas']} cop{'y' if d['replicas'] == 1 else 'ies'}"]
    return [f"parity over {d['replicas']} nodes{f', any {lost} of which may be lost' * (lost > 1)}"]


def describe_possible_losses(d: Document) -> str:
    """Return how many nodes the job may lose now, and the step at which it would resume.

    A job of several trainings survives what each of them survives: the line is of the least protected one.
    """
    if not d["trainings"]:
        return "nothing yet"
    worst = min(d["trainings"], key=_measure_safety)
    scope = f" (training {worst['name']})" if len(d["trainings"]) > 1 else ""
    v = worst["survival"]
    if v["lost_already"]:
        return f"nothing yet{scope}"
    shares = [format_share(row["k"], row["probability"]) for row in v["survives"]]
    sure = sum(row["probability"] >= 1.0 for row in v["survives"])
    return f"{shares[max(0, sure - 1)]}{scope}{_describe_newest(worst)}"


def _measure_safety(s: Document) -> tuple[bool, list[float]]:
    """Return a key by which the least protected training comes first."""
    return not s["survival"]["lost_already"], [row["probability"] for row in s["survival"]["survives"]]


def _describe_newest(s: Document) -> str:
    if not (counted := s["survival"]["counted_version"]):
        return ""
    ages = [
        holder["age_s"]
        for shard in s["shards"]
        for holder in shard["holders"]
        if holder["version"] == counted and holder["age_s"] is not None
    ]
    return f"; step {counted[1]} is safe{f', {format_age(min(ages))} old' if ages else ''}"


def format_share(k: int, probability: float) -> str:
    """Return how likely the loss of `k` nodes is survived."""
    what = f"{k} node{'s' * (k > 1)}"
    if probability in (0.0, 1.0):
        return f"{'any' if probability else 'never'} {what}"
    return f"{what} in {100 * probability:.3g} % of cases"


def choose_advice(d: Document) -> str:
    """Return what the owner or the administrator should do, most urgent first; "nothing" where all is well."""
    job, state = d["job"], d["state"]
    if d["ended"] is not None:
        return _choose_end_advice(d)
    if not d["trainings"] and d["slurm"].get("state") in _WAITING:
        return "nothing; the job waits for Slurm"
    silent = [n["host"] for n in d["nodes"] if not n["agent"] and n["member"]] or list(d["missing"])
    if silent and d["slurm"].get("state") == "RUNNING" and state != "recovering":
        return f"run gemini-hpc doctor on {join_names(silent)}: no agent answers there"
    if state == "unprotected":
        return "see the note; the training runs on without new copies"
    if state == "waiting":
        return "nothing; the copies wait for the job to start again"
    if state == "recovering":
        return "nothing; the ranks get their state back from the copies"
    for s in d["trainings"]:
        if s["stalled"]:
            hung = s["stalled"].get("hung")
            return (
                f"look at {hung}"
                if hung
                else f"look at the ranks of training {s['name']} (py-spy dump): they complete no step"
            )
    if any(s["state"] == "degraded" for s in d["trainings"]):
        return "see the note; nothing newer is sealed, so a failure repeats more and more steps"
    for s in d["trainings"]:
        if s["tier"] and s["tier"]["problem"]:
            return f"repair the tier: {s['tier']['problem']}"
    if not d["trainings"]:
        return "nothing, if the training is still starting; else see whether it makes a gemini_hpc.Checkpointer"
    arming = [s["name"] for s in d["trainings"] if s["state"] == "arming"]
    if arming:
        return f"nothing; training {join_names(arming)} seals its first version within its first steps"
    return f"nothing (gemini-hpc inspect {job} --full lists nodes, shards and events)"


def _choose_end_advice(d: Document) -> str:
    how = d["ended"]
    if how["state"] == "COMPLETED":
        return "nothing"
    if d["kept_until"] and how["version"]:
        return f"to go on from step {how['version']}: sbatch --gemini-after={d['job']} ..., while the copies are kept"
    if how["stored"]:
        return f"to go on from step {how['stored']} on the tier: sbatch --gemini-after={d['job']} ..."
    return "see the events below"


def join_names(names: Sequence[str]) -> str:
    """Return the names, some of them left out if they are many."""
    shown = list(names[:MAX_HOSTS_SHOWN])
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


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
