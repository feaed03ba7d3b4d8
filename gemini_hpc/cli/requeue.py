"""The verb `requeue --after-save JOBID`: save a job's newest version to its tier, then have Slurm requeue it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from gemini_hpc.cli.job_id import UserError, WrongIdError, raw_id
from gemini_hpc.config import CONFIG_PATH, ConfigError
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[Any]


def register(subparsers: _Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "requeue",
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
    parser.add_argument("job", metavar="JOBID", help="job id, or array task as 10_3")
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Save and requeue the job, and return the exit status: 0, 1 after an error, 2 for a wrong command line."""
    from gemini_hpc.query import ask
    from gemini_hpc.slurm import SlurmError
    from gemini_hpc.wire import own_key

    try:
        job = raw_id(args.job)
        saved = ask.flush(own_key.settings_for(job, args.config), job, lambda word: None)
        if why := "; ".join(word.reason for word in saved if word.reason):
            raise UserError(f"job {job} runs on: {why} (scontrol requeue {job} requeues it all the same)")
        asyncio.run(_requeue(job))
    except WrongIdError as exc:
        print(f"gemini-hpc requeue: {exc}", file=sys.stderr)
        return 2
    except (UserError, ConfigError, ask.QueryError, SlurmError) as exc:
        print(f"gemini-hpc requeue: {sanitize(str(exc))}", file=sys.stderr)
        return 1
    steps = {word.training: word.stamp.version for word in saved}
    if args.json:
        print(json.dumps({"schema": 1, "job": job, "saved": steps}))
    else:
        told = ", ".join(f"{sanitize(name)} at step {step}" for name, step in steps.items())
        print(f"job {job} is requeued; saved: {told}")
    return 0


async def _requeue(job: int) -> None:
    """Requeue the job.

    Raises:
        UserError: Slurm could never start the job again.
        SlurmError: Slurm refuses.
    """
    from gemini_hpc.query.slurm_facts import never_requeued
    from gemini_hpc.slurm import Slurm

    slurm = Slurm()
    found = await slurm.read_job(job)
    if why := never_requeued(found):
        raise UserError(f"job {job} runs on: {why}")
    await slurm.requeue_job(found)
