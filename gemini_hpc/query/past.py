"""What the event log of a job says of its end: pure rules, for `inspect` of a job that is over and for `jobs`.

Only lines without a host are the controller's own; any other line is the word of an agent, which is its user's.
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
_SEALED = ("detached", "released", "saved", "resumed")  # events whose version had been sealed
# After one of these from the controller the job is, or is to be, alive again.
_LIVES = frozenset(("requeued", "sent_back", "running", "configuring", "detected"))


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended. `t`: Unix time, 0.0 where it is not known; `version`: the newest that was sealed, 0: none is
    known of; `stored`: the newest on the tier; `exit_code` as Slurm writes it, or empty."""

    state: str
    t: float
    exit_code: str
    version: int
    stored: int


def told(state: str, exit_code: str) -> str:
    """The detail of the controller's event."""
    return f"{state} exit {exit_code}" if re.fullmatch(r"[0-9]{1,3}:[0-9]{1,3}", exit_code) else state


def over(slurm: dict[str, str]) -> bool:
    """Whether a job is over by Slurm's word: in a state that no job leaves, or forgotten."""
    return bool(slurm.get("state")) and slurm["state"] not in LIVE


def ending(events: Sequence[EventRecord], slurm: dict[str, str]) -> Ending | None:
    """How the job ended; None while it is not over. `events` in order of time."""
    if not over(slurm):
        return None
    state, t, exit_code = slurm["state"], _number(slurm.get("end_time", "")), slurm.get("exit_code", "")
    last = next((e for e in reversed(events) if e.name == ENDED and not e.host), None)
    if last is not None and not any(e.t > last.t and e.name in _LIVES and not e.host for e in events):
        word = _WORD.fullmatch(last.detail)
        if state == UNKNOWN and word:
            state, exit_code = word[1], word[2] or ""
        t = t or last.t
    # of the newest life: what an earlier one had may have been lost
    sealed = max(((e.restart, e.version) for e in events if e.name in _SEALED and e.version), default=(0, 0))
    version = sealed[1]
    stored = max((e.version for e in events if e.name == "saved"), default=0)
    return Ending(state, t, exit_code, version, stored)


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text) else 0.0
