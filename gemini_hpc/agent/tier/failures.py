"""Reasons why versions do not reach the tier. Each is logged once, and reported to the program if it persists."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NUMBER = re.compile(r"[0-9]+")  # a number of a version or of bytes does not make a new reason
_LASTED = 2  # failed tries in a row before the program is informed; one save that the training overtakes is harmless
_CHARS = 500  # characters of a reason in the note for the program


@dataclass
class _Trouble:
    """The failures of one training since its last save.

    Attributes:
        text: The last reason.
        kinds: Reasons that have been logged.
        times: Failed tries in a row.
        reported: Whether the program has been informed.
    """

    text: str = ""
    kinds: set[str] = field(default_factory=set)
    times: int = 0
    reported: bool = False


class SaveFailures:
    """The failures of all trainings of a job. Failures of the tier itself have the name ""."""

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}
        self._notes: dict[str, str] = {}

    def describe_last(self, name: str) -> str:
        """Return the last failure, or ""."""
        return self._troubles[name].text if name in self._troubles else ""

    def record_failure(self, name: str, reason: str, host: str = "") -> bool:
        """Record a failed try on this host. Return whether the reason is new."""
        trouble = self._troubles.setdefault(name, _Trouble())
        trouble.text = f"{host}: {reason}" if host else reason
        trouble.times += 1
        if name and trouble.times >= _LASTED and not trouble.reported:
            trouble.reported = True
            self._notes[name] = f"versions are not saved to the tier: {trouble.text[:_CHARS]}; the agents keep trying"
        kind = _NUMBER.sub("", reason)
        new = kind not in trouble.kinds
        trouble.kinds.add(kind)
        return new

    def record_success(self, name: str) -> None:
        """Record a successful try."""
        trouble = self._troubles.pop(name, None)
        if trouble is not None and trouble.reported:
            self._notes[name] = "versions are saved to the tier again"

    def pop_note(self, name: str) -> str:
        """Return a note on a training for the program, once, or ""."""
        return self._notes.pop(name, "")
