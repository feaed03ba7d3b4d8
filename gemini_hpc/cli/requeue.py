"""The verb `requeue --after-save JOBID`: save a job's newest version to its tier, then have Slurm requeue it."""

from __future__ import annotations

import argparse
import asyncio

from gemini_hpc.cli import frame
from gemini_hpc.wire.sanitize import sanitize


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "requeue",
        run,
        "gemini-hpc requeue --after-save 42",
        help="save a job's newest version, then requeue the job",
        description="Write the newest sealed version of a running job to its persistent tier (--gemini-tier), wait "
        "until it is there, and have Slurm requeue the job: before a node is taken away, say. The job resumes from "
        "memory where that is still there, else from the tier. If the save fails, the job runs on. For the job's "
        "owner, root and SlurmUser.",
        epilog="Exit status: 0 if the job was requeued; otherwise prints the reason and exits 1.",
    )
    parser.add_argument(
        "--after-save", action="store_true", required=True, help="requeue only once the save is complete"
    )
    frame.add_job(parser)
    frame.add_json(parser, "print one JSON document at the end")
    frame.add_config(parser)


def run(args: argparse.Namespace) -> frame.Result:
    """Save and requeue the job."""
    from gemini_hpc.query import ask

    settings, job = frame.find_job(args)
    saved = ask.flush(settings, job, lambda word: None)
    if why := "; ".join(word.reason for word in saved if word.reason):
        raise frame.UserError(f"job {job} runs on: {why} (scontrol requeue {job} requeues it all the same)")
    asyncio.run(_requeue_job(job))
    steps = {word.training: word.stamp.version for word in saved}
    saved_text = ", ".join(f"{sanitize(name)} at step {step}" for name, step in steps.items())
    document = {"schema": 1, "job": job, "saved": steps}
    return frame.Result(document, lambda _: f"job {job} is requeued; saved: {saved_text}")


async def _requeue_job(job: int) -> None:
    """Requeue the job.

    Raises:
        UserError: Slurm could never start the job again.
        SlurmError: Slurm refuses.
    """
    from gemini_hpc.query.slurm_facts import explain_no_requeue
    from gemini_hpc.slurm import Slurm

    slurm = Slurm()
    found = await slurm.read_job(job)
    if why := explain_no_requeue(found):
        raise frame.UserError(f"job {job} runs on: {why}")
    await slurm.requeue_job(found)
