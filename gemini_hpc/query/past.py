"""The past of a job according to its event log: its end, its recoveries, the copies that were freed. Pure rules.

Only events without a host are the controller's own. Any other event is the report of an agent, which belongs
to a user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gemini_hpc.durations import format_time
from gemini_hpc.slurm.facts import LIVE
from gemini_hpc.wire.inspect_schema import EventRecord

ENDED = "ended"
UNKNOWN = "UNKNOWN"
_WORD = re.compile(r"([A-Z_]{1,32})(?: exit ([0-9]{1,3}:[0-9]{1,3}))?")
SEALED = ("detached", "released", "saved", "resumed")  # events whose version had been sealed
# After one of these events of the controller the job is alive again, or will be.
_LIVES = frozenset(("requeued", "sent_back", "running", "configuring", "detected"))
RECOVERY_STARTS = ("detected", "taken_over")
RECOVERY_GAP_S = 900.0  # a recovery with a requeue in a queue may pause for this long
_DEEDS = frozenset(("taken_over", "confirmed", "down", "sent_back", "requeued", "running", "goes_on", "without"))
_BACK = frozenset(("running", "goes_on", "first_iteration"))
_RECOVERY_END = "first_iteration"
_SILENT = " is silent; "  # in an agent's report, behind the name of the silent node
_SHOWN = 8
_NO_LOSS = ("the training succeeded", "it holds nothing")  # reasons of `released` without interest for the user


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job.

    Attributes:
        state: Slurm's state.
        t: Unix time in seconds, 0.0 if unknown.
        exit_code: In Slurm's form, "" if unknown.
        version: The newest sealed version, 0 if none is known.
        stored: The newest version on the tier, 0 if none is known.
    """

    state: str
    t: float
    exit_code: str
    version: int
    stored: int


def describe_end(state: str, exit_code: str) -> str:
    """Return the detail of the controller's event on the end of a job."""
    return f"{state} exit {exit_code}" if re.fullmatch(r"[0-9]{1,3}:[0-9]{1,3}", exit_code) else state


def has_ended(slurm: dict[str, str]) -> bool:
    """Return whether Slurm reports the job as ended: in a final state, or forgotten."""
    return bool(slurm.get("state")) and slurm["state"] not in LIVE


def derive_end(events: Sequence[EventRecord], slurm: dict[str, str]) -> JobEnd | None:
    """Return how the job ended, None if it has not ended. `events` are in order of time."""
    if not has_ended(slurm):
        return None
    state, t, exit_code = slurm["state"], _parse_number(slurm.get("end_time", "")), slurm.get("exit_code", "")
    last = next((e for e in reversed(events) if e.name == ENDED and not e.host), None)
    if last is not None and not any(e.t > last.t and e.name in _LIVES and not e.host for e in events):
        word = _WORD.fullmatch(last.detail)
        if state == UNKNOWN and word:
            state, exit_code = word[1], word[2] or ""
        t = t or last.t
    # only of the newest incarnation: versions of earlier ones may have been lost
    sealed = max(((e.restart, e.version) for e in events if e.name in SEALED and e.version), default=(0, 0))
    version = sealed[1]
    stored = max((e.version for e in events if e.name == "saved"), default=0)
    return JobEnd(state, t, exit_code, version, stored)


def _parse_number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text) else 0.0


def merge_events(events: Iterable[EventRecord]) -> list[EventRecord]:
    """Return the events sorted by time, each once.

    Duplicates arise because agents send events to the controller and also return them when queried.
    """
    unique = {(round(e.t, 3), e.name, e.host, e.restart, e.version, e.detail): e for e in events}
    return sorted(unique.values(), key=lambda e: e.t)


def _list_suspects(log: Iterable[EventRecord]) -> set[str]:
    """Return the silent nodes; an agent's report carries the agent's host, and the silent node in its detail."""
    detections = [e for e in log if e.name == "detected"]
    return {e.detail.partition(_SILENT)[0] if _SILENT in e.detail else e.host for e in detections}


def _was_false_alarm(log: Sequence[EventRecord]) -> bool:
    """Return whether all suspects turned out to live, and no action was taken."""
    suspected, cleared = _list_suspects(log), {e.host for e in log if e.name == "dismissed"}
    return bool(suspected) and suspected <= cleared and not any(e.name in _DEEDS for e in log)


def _is_completed(log: Sequence[EventRecord]) -> bool:
    """Return whether the job came back: it runs again, or has continued with a spare."""
    acted = next((i for i, e in enumerate(log) if e.name in _DEEDS or e.restart > log[0].restart), len(log))
    return any(e.name in _BACK for e in log[acted:])


def list_recoveries(events: Sequence[EventRecord]) -> list[dict[str, Any]]:
    """Return the recoveries, each from the first report to the last event before the next recovery.

    `completed` means that the job came back. Dismissed suspicions are no recoveries.
    """
    found: list[list[EventRecord]] = []
    for event in events:
        # A second dead node of the same incarnation belongs to the running recovery.
        newest = found[-1] if found else []
        over = not newest or event.t - newest[-1].t >= RECOVERY_GAP_S or _was_false_alarm(newest)
        if event.name in RECOVERY_STARTS and (over or newest[0].restart != event.restart):
            found.append([event])
        elif not over and not (newest[-1].name == _RECOVERY_END and _is_completed(newest)):
            newest.append(event)
    documents = []
    for log in found:
        if _was_false_alarm(log):
            continue
        began, last, rows = log[0].t, log[0].t, []
        for e in log:
            row = {"t": e.t, "after_s": round(e.t - began, 3), "gap_s": round(e.t - last, 3), "name": e.name}
            rows.append({**row, "host": e.host, "detail": e.detail})
            last = e.t
        total_s = round(last - began, 3)
        head = {"restart": log[0].restart, "began": began, "total_s": total_s, "completed": _is_completed(log)}
        documents.append({**head, "events": rows})
    return documents


def describe_freed_copies(events: Iterable[EventRecord], restart: int) -> str:
    """Return one sentence on the copies of this incarnation that its agents have freed, or "".

    An agent's event holds the version that was sealed (0 without one), and its reason before the first
    semicolon.
    """
    released = (e for e in events if e.name == "released" and e.version and e.restart == restart)
    found = {e.host: e for e in released if not e.detail.startswith(_NO_LOSS)}
    if not found:
        return ""
    hosts, last = sorted(found), max(found.values(), key=lambda e: e.t)
    shown = ", ".join(hosts[:_SHOWN]) + (f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else "")
    when = format_time(last.t, "%b %d %H:%M")
    why = last.detail.split(";")[0][:120]
    return f"lost: the copies of version {last.version} on {shown} were freed at {when}: {why}"
