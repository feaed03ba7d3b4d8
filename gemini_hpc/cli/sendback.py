"""The job's own last resort, where nobody else requeues it: it asks Slurm, as its owner may."""

from __future__ import annotations

import asyncio
import os

from gemini_hpc.slurm import Slurm, SlurmError
from gemini_hpc.slurm.facts import RUNNING

TIMEOUT_S = 15.0


def is_smaller() -> bool:
    """Whether Slurm has taken a lost node out of the running job (`sbatch --no-kill`); False: not known."""
    raw_id, nodes = _number("SLURM_JOB_ID"), _number("SLURM_JOB_NUM_NODES")
    try:
        job = asyncio.run(Slurm(TIMEOUT_S).job(raw_id))
    except SlurmError:
        return False
    return job.state == RUNNING and 0 < len(job.nodes) < nodes


def requeue() -> str:
    """Ask for it; why Slurm refused, or ""."""
    try:
        asyncio.run(_requeue(_number("SLURM_JOB_ID")))
    except SlurmError as exc:
        return str(exc)
    return ""


async def _requeue(raw_id: int) -> None:
    slurm = Slurm(TIMEOUT_S)
    await slurm.requeue(await slurm.job(raw_id))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 11 else 0
