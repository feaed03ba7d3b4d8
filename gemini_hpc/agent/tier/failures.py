"""Why versions do not get to the tier: each reason is told once, and to the program when it has lasted."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NUMBER = re.compile(r"[0-9]+")  # of a version, of bytes
_LASTED = 2  # tries in a row; a training that has overtaken one save is no trouble
_CHARS = 500


@dataclass
class _Trouble:
    """Of one set since it was saved last. kinds: reasons that have been told; told: whether the program was."""

    text: str = ""
    kinds: set[str] = field(default_factory=set)
    times: int = 0
    told: bool = False


class SaveFailures:
    """Of all sets of a job; of the tier as such under the name ""."""

    def __init__(self) -> None:
        self._of: dict[str, _Trouble] = {}
        self._notes: dict[str, str] = {}

    def text(self, name: str) -> str:
        """The last one, or ""."""
        return self._of[name].text if name in self._of else ""

    def met(self, name: str, reason: str, host: str = "") -> bool:
        """A try has failed, on this host; whether that has not been told yet."""
        trouble = self._of.setdefault(name, _Trouble())
        trouble.text = f"{host}: {reason}" if host else reason
        trouble.times += 1
        if name and trouble.times >= _LASTED and not trouble.told:
            trouble.told = True
            self._notes[name] = f"versions are not saved to the tier: {trouble.text[:_CHARS]}; the agents keep trying"
        kind = _NUMBER.sub("", reason)
        new = kind not in trouble.kinds
        trouble.kinds.add(kind)
        return new

    def over(self, name: str) -> None:
        """A try has succeeded."""
        trouble = self._of.pop(name, None)
        if trouble is not None and trouble.told:
            self._notes[name] = "versions are saved to the tier again"

    def note(self, name: str) -> str:
        """What the program is to be told of a set, once; else ""."""
        return self._notes.pop(name, "")
