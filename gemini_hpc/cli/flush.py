"""The verb `flush JOBID`: write a job's replicas from memory to its persistent tier now."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from gemini_hpc.cli.job_id import UserError, WrongIdError, raw_id
from gemini_hpc.config import CONFIG_PATH, ConfigError
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    from gemini_hpc.wire.flush import Flushing

    _Subparsers = argparse._SubParsersAction[Any]


def register(subparsers: _Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "flush",
        help="write a job's newest version to its persistent tier now",
        description="Write the newest sealed version of a job to its persistent tier (--gemini-tier) now, and wait "
        "until it is there. The training goes on meanwhile. For a job that waits for nodes, its "
        "former nodes write the version from their memory. For the job's owner, root and SlurmUser.",
        epilog="Exit status: 0 if every training of the job was written; otherwise prints the reason and exits 1.",
    )
    parser.add_argument("job", metavar="JOBID", help="job id, or array task as 10_3")
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Flush the job and return the exit status: 0, 1 after an error, 2 for a wrong command line."""
    from gemini_hpc.query import ask
    from gemini_hpc.wire import own_key

    try:
        job = raw_id(args.job)
        progress = _progress if sys.stderr.isatty() else lambda word: None
        over = ask.flush(own_key.settings_for(job, args.config), job, progress)
    except WrongIdError as exc:
        print(f"gemini-hpc flush: {exc}", file=sys.stderr)
        return 2
    except (UserError, ConfigError, ask.QueryError) as exc:
        print(f"gemini-hpc flush: {sanitize(str(exc))}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"schema": 1, "job": job, "trainings": [_document(word) for word in over]}))
    for word in over:
        if word.reason:
            of = f"training {word.training}: " if word.training else ""
            print(f"gemini-hpc flush: job {job}: {of}{sanitize(word.reason)}", file=sys.stderr)
        elif not args.json:
            print(
                f"training {sanitize(word.training)}: version {word.stamp[0]}:{word.stamp[1]} is in "
                f"{sanitize(word.where)}"
            )
    return 1 if any(word.reason for word in over) else 0


def _progress(word: Flushing) -> None:
    if not word.over:
        what = f"version {word.stamp.epoch}:{word.stamp.version}"
        text = f"training {sanitize(word.training)}: {what}, {word.bytes / 1e6:.0f} MB written"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _document(word: Flushing) -> dict[str, object]:
    return {
        "training": word.training,
        "version": list(word.stamp) if word.stamp[1] else None,
        "where": word.where or None,
        "reason": word.reason or None,
    }
