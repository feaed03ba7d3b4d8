"""Directories of versions, made as a worker makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import publish
from gemini_hpc.tier.job_directory import Mark


def version_directory(
    tier: str | Path, job: int, training_name: str, stamp: Stamp, lay_out: Callable[[str], object] = lambda path: None
) -> str:
    """Return the path of a version's directory of a job without a key, made if it is not there."""
    with publish.make_version(str(tier), Mark(job), training_name, stamp, lay_out) as made:
        return made.where
