"""The verb `versions`: list a job's versions on the persistent tier and their names (`Checkpointer.keep`)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from gemini_hpc.cli.export import ExportError, job_or_directory
from gemini_hpc.cli.job_id import UserError, WrongIdError
from gemini_hpc.config import CONFIG_PATH, ConfigError
from gemini_hpc.wire.sanitize import sanitize

_Subparsers = Any
SCHEMA = 1


def register(subparsers: _Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "versions",
        help="list a job's versions on the persistent tier, with their names",
        description="List the whole versions of a job on the persistent tier, newest first: set, version, ranks, "
        "size, when it was saved, and the names under which it stays for good (Checkpointer.keep). Reads the "
        "directory only: the job may have ended long ago.",
    )
    parser.add_argument(
        "what", metavar="JOBID|DIR", help="a job or array task (10_3), or a directory: of a job or of a training"
    )
    parser.add_argument(
        "--tier", metavar="DIR", default="", help="the job's --gemini-tier (default: the site's tier)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document (schema 1)")
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """List the versions and return the exit status: 0, 1 after an error, 2 for a wrong command line."""
    try:
        found = collect(job_or_directory(args.what, args.tier, args.config))
    except WrongIdError as error:
        print(f"gemini-hpc versions: {error}", file=sys.stderr)
        return 2
    except (ExportError, UserError, ConfigError, OSError, ValueError) as error:
        print(f"gemini-hpc versions: {sanitize(str(error))}", file=sys.stderr)
        return 1
    print(json.dumps({"schema": SCHEMA, "versions": found}) if args.json else _table(found))
    return 0


def collect(path: str) -> list[dict[str, Any]]:
    """Return all whole versions below a job's or a training's directory. Raises ValueError, OSError."""
    from gemini_hpc.core.numbers import TRAINING_NAME
    from gemini_hpc.tier import names, version

    if not os.path.isdir(path):
        raise ValueError(f"{path}: no such directory")
    below = [f"{path}/{entry}" for entry in sorted(os.listdir(path)) if TRAINING_NAME.fullmatch(entry)]
    found = []
    for directory in [path] if version.stamps(path) else below:
        for manifest in version.whole(directory) if os.path.isdir(directory) else ():
            where = f"{directory}/{version.name(manifest.stamp)}"
            found.append(
                {
                    "training": manifest.training,
                    "version": list(manifest.stamp),
                    "ranks": manifest.world,
                    "bytes": sum(file.bytes for file in manifest.files),
                    "time": manifest.time,
                    "kept": os.path.lexists(f"{where}/{version.KEPT}"),
                    "rejected": os.path.lexists(f"{where}/{version.REJECTED}"),
                    "names": sorted(names.of_version(where)),
                    "where": where,
                }
            )
    return found


def _table(found: list[dict[str, Any]]) -> str:
    rows = [("SET", "VERSION", "RANKS", "SIZE", "SAVED", "NAMES")]
    for v in found:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(v["time"]))
        named = ", ".join(v["names"]) or ("(stays)" if v["kept"] else "")
        named = f"{named} (rejected)".strip() if v["rejected"] else named
        rows.append(
            (v["training"], str(v["version"][1]), str(v["ranks"]), f"{v['bytes'] / 1e6:.1f} MB", saved, named)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) if found else "no version is whole"
