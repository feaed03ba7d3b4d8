"""The names of several trainings in one process."""

from __future__ import annotations

_begun: dict[str, int] = {}


def next_name(base: str = "default") -> str:
    """For a training that begins now: `base`, then `base-2` and so on. What an earlier one has ended with is not the
    state of the next, whichever object runs it; a script that is started again begins them in the same order."""
    number = _begun[base] = _begun.get(base, 0) + 1
    return base if number == 1 else f"{base}-{number}"
