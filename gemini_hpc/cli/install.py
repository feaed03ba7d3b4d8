"""The verb `install`: say which lines Slurm's files need on this host, and why; never edit one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[Any]

SCHEMA = 1
COMPLETE, INCOMPLETE, UNUSABLE = 0, 1, 2


def register(subparsers: _Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "install",
        help="say which lines slurm.conf and plugstack.conf need",
        description="Compare slurm.conf and plugstack.conf of this host with what gemini-hpc needs, and print the "
        "lines that are missing, with reasons. Nothing is changed, so --dry-run must be given. "
        "Exit status: 0 no line is missing, 1 some are, 2 wrong command line or no slurm.conf.",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the lines; the verb can do nothing else")
    parser.add_argument("--json", action="store_true", help="print a JSON document (schema 1)")
    parser.add_argument(
        "--slurm-conf",
        metavar="FILE",
        default=os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf",
        help="the site's slurm.conf (default: $SLURM_CONF or /etc/slurm/slurm.conf)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the needs and return the exit status.

    Returns:
        0 if no line is missing, 1 if some are, 2 for a wrong command line or an unreadable slurm.conf.
    """
    from gemini_hpc.doctor import site_lines
    from gemini_hpc.report import columns

    if not args.dry_run:
        print("gemini-hpc install: it never edits Slurm's files: run it with --dry-run", file=sys.stderr)
        return UNUSABLE
    path = os.path.abspath(args.slurm_conf)
    try:
        needs = site_lines.needs(path, site_lines.release(path))
    except OSError as error:
        print(f"gemini-hpc install: {error.filename or path}: {error.strerror}", file=sys.stderr)
        return UNUSABLE
    open_needs = [need for need in needs if not need.met]
    if args.json:
        print(json.dumps({"schema": SCHEMA, "slurm_conf": path, "lines": [asdict(need) for need in needs]}))
        return INCOMPLETE if open_needs else COMPLETE
    for need in open_needs:
        now = f" It says now: {need.found}." if need.found else ""
        print(f"{need.file}: {need.line}")
        print("\n".join(columns.fold(f"Reason: {need.why}.{now}", columns.width(), "    ", "    ")))
    if open_needs:
        print("Nothing was changed. Then: `scontrol reconfigure`; restart slurmd where PrologFlags is new.")
    else:
        print(f"{path}: no line is missing. `gemini-hpc doctor` examines the Slurm that runs.")
    return INCOMPLETE if open_needs else COMPLETE
