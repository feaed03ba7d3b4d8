"""Count the trainings that this process has closed: the next one of the name is another one."""

from __future__ import annotations

import os
from collections import Counter

_closed: Counter[tuple[str, ...]] = Counter()


def nth(name: str) -> int:
    """Return the number of the training of this name that comes now, from 1."""
    return _closed[_key(name)] + 1


def count(name: str) -> None:
    """Record that a training of this name is closed."""
    _closed[_key(name)] += 1


def _key(name: str) -> tuple[str, ...]:
    """Return the name with the launch and the job: a process of another one begins anew."""
    return (name, *(os.environ.get(key, "") for key in ("GEMINI_SOCKET", "GEMINI_STEP", "SLURM_STEP_ID")))
