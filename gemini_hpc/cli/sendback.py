"""Requeue of a job by itself, as its owner may do, if no other party requeues it."""

from __future__ import annotations

import asyncio
import os

from gemini_hpc.core.numbers import parse_number
from gemini_hpc.slurm import Slurm, SlurmError
from gemini_hpc.slurm.facts import RUNNING

TIMEOUT_S = 15.0  # slurmctld fails over to its backup within this time


def list_nodes_left() -> tuple[str, ...]:
    """Return the remaining nodes of the running job if Slurm has removed lost nodes (`sbatch --no-kill`).

    Returns:
        The remaining nodes; () if none was removed, or if that is unknown.
    """
    raw_id, nodes = _read_raw_id(), parse_number(os.environ.get("SLURM_JOB_NUM_NODES", ""))
    if not raw_id or nodes < 2:
        return ()
    try:
        job = asyncio.run(Slurm(TIMEOUT_S).read_job(raw_id))
    except SlurmError:
        return ()
    return job.nodes if job.state == RUNNING and 0 < len(job.nodes) < nodes else ()


def read_start_time() -> float:
    """Return the Unix time at which this incarnation of the job began, 0.0 if that is unknown."""
    try:
        return asyncio.run(Slurm(TIMEOUT_S).read_job(_read_raw_id())).start_time
    except SlurmError:
        return 0.0


def requeue_job() -> str:
    """Ask Slurm to requeue this job; return the reason for a refusal, or ""."""
    try:
        asyncio.run(_requeue_job(_read_raw_id()))
    except SlurmError as exc:
        return str(exc)
    return ""


async def _requeue_job(raw_id: int) -> None:
    slurm = Slurm(TIMEOUT_S)
    await slurm.requeue_job(await slurm.read_job(raw_id))


def _read_raw_id() -> int:
    return parse_number(os.environ.get("SLURM_JOB_ID", ""))
