"""The names of several trainings in one process."""

from __future__ import annotations

_begun: dict[str, int] = {}


def choose_next_name(base: str = "default") -> str:
    """Return the name of a training that begins now: `base`, then `base-2` and so on.

    The final state of an earlier training is not the state of the next, even if one object runs both. A restarted
    script begins its trainings in the same order, so each gets its name again.
    """
    number = _begun[base] = _begun.get(base, 0) + 1
    return base if number == 1 else f"{base}-{number}"
