"""The verb `evacuate JOBID NODE`: move a running job off a node, with a spare of its own in the node's place."""

from __future__ import annotations

import argparse
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
        "evacuate",
        help="move a running job off one of its nodes, onto a spare",
        description="Have a running job leave one of its nodes: right after the next sealed version all ranks begin "
        "again in the same step, with a spare of the job (--gemini-spares) in the node's place. The node stays "
        "allocated to the job, idle. Draining it in Slurm does the same. For the job's owner, root and SlurmUser.",
        epilog="Exit status: 0 when the job goes on without the node; otherwise prints the reason and exits 1.",
    )
    parser.add_argument("job", metavar="JOBID", help="job id, or array task as 10_3")
    parser.add_argument("node", metavar="NODE", help="the node, as Slurm names it")
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Evacuate the node and return the exit status: 0, 1 after an error, 2 for a wrong command line."""
    from gemini_hpc.query import ask
    from gemini_hpc.wire import own_key

    try:
        job = raw_id(args.job)
        ask.evacuate(own_key.settings_for(job, args.config), job, args.node)
    except WrongIdError as exc:
        print(f"gemini-hpc evacuate: {exc}", file=sys.stderr)
        return 2
    except (UserError, ConfigError, ask.QueryError) as exc:
        print(f"gemini-hpc evacuate: {sanitize(str(exc))}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"schema": 1, "job": job, "node": args.node}))
    else:
        print(f"job {job} goes on without {sanitize(args.node)}")
    return 0
