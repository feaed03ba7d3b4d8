"""The end of a job according to its event log: pure rules, for `inspect` of an ended job and for `jobs`.

Only events without a host are the controller's own. Any other event is the report of an agent, which belongs
to a user.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gemini_hpc.slurm.facts import LIVE
from gemini_hpc.wire.inspect_schema import EventRecord

ENDED = "ended"
UNKNOWN = "UNKNOWN"
_WORD = re.compile(r"([A-Z_]{1,32})(?: exit ([0-9]{1,3}:[0-9]{1,3}))?")
SEALED = ("detached", "released", "saved", "resumed")  # events whose version had been sealed
# After one of these events of the controller the job is alive again, or will be.
_LIVES = frozenset(("requeued", "sent_back", "running", "configuring", "detected"))


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
