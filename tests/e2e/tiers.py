"""What a job has saved on its tier."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import version


class _Job(Protocol):
    id: int


def saved(tier: Path, job: _Job) -> list[Stamp]:
    """Return the whole versions of a job, newest first."""
    return [Stamp(*m.stamp) for m in version.list_whole(f"{tier}/gemini-{job.id}/default")]
