"""The verb `install`: say which lines Slurm's files need on this host, and why; never edit one."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from gemini_hpc.cli import frame
from gemini_hpc.report import columns

if TYPE_CHECKING:
    from gemini_hpc.doctor.site_lines import Need

SCHEMA = 1


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "install",
        run,
        "gemini-hpc install --dry-run",
        "gemini-hpc install --dry-run --slurm-conf new/slurm.conf",
        help="print the lines that slurm.conf and plugstack.conf lack",
        description="Compare slurm.conf and plugstack.conf of this host with what gemini-hpc needs, and print the "
        "lines that are missing, with reasons. Nothing is changed, so --dry-run must be given. "
        "Exit status: 0 no line is missing, 1 some are, 2 wrong command line or no slurm.conf.",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the lines; the verb can do nothing else")
    frame.add_json(parser, "print a JSON document (schema 1)")
    parser.add_argument(
        "--slurm-conf",
        metavar="FILE",
        default=os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf",
        help="the site's slurm.conf (default: $SLURM_CONF or /etc/slurm/slurm.conf)",
    )


def run(args: argparse.Namespace) -> frame.Result:
    """Find the needs. The exit status is 0 if no line is missing, 1 if some are.

    Raises:
        UsageError: The command line is wrong, or slurm.conf unreadable.
    """
    from gemini_hpc.doctor import site_lines

    if not args.dry_run:
        raise frame.UsageError("it never edits Slurm's files: run it with --dry-run")
    path = os.path.abspath(args.slurm_conf)
    try:
        needs = site_lines.list_needs(path, site_lines.read_release(path))
    except OSError as error:
        raise frame.UsageError(f"{error.filename or path}: {error.strerror}") from None
    document = {"schema": SCHEMA, "slurm_conf": path, "lines": [asdict(need) for need in needs]}
    missing = [need for need in needs if not need.met]
    return frame.Result(document, lambda _: _format_needs(missing, path), int(bool(missing)))


def _format_needs(missing: list[Need], path: str) -> str:
    lines = []
    for need in missing:
        now = f" Found: {need.found}." if need.found else ""
        reason = columns.fold(f"Reason: {need.why}.{now}", columns.measure_width(), "    ", "    ")
        lines += [f"{need.file}: {need.line}", *reason]
    if missing:
        lines.append("Nothing was changed. Then: `scontrol reconfigure`; restart slurmd where PrologFlags is new.")
    else:
        lines.append(f"{path}: no line is missing. `gemini-hpc doctor` examines the Slurm that runs.")
    return "\n".join(lines)
