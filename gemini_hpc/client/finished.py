"""A count of the trainings that this process has closed, to number later trainings of the same name."""

from __future__ import annotations

import os
from collections import Counter

_closed: Counter[tuple[str, ...]] = Counter()


def number_training(name: str) -> int:
    """Return the number of the current training of this name, counted from 1."""
    return _closed[_build_key(name)] + 1


def record_closed(name: str) -> None:
    """Record that a training of this name is closed."""
    _closed[_build_key(name)] += 1


def _build_key(name: str) -> tuple[str, ...]:
    """Return the name with launch and job, so that a process of another launch or job counts from 1 again."""
    return (name, *(os.environ.get(key, "") for key in ("GEMINI_SOCKET", "GEMINI_STEP", "SLURM_STEP_ID")))
