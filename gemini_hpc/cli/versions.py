"""The verb `versions`: list a job's versions on the persistent tier and their names (`Checkpointer.keep`)."""

from __future__ import annotations

import argparse
import os
from typing import Any

from gemini_hpc.cli import frame
from gemini_hpc.cli.export import find_directory
from gemini_hpc.durations import format_time
from gemini_hpc.report.columns import align

SCHEMA = 1


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "versions",
        run,
        "gemini-hpc versions 42",
        "gemini-hpc versions /lustre/ada/ckpt",
        errors=(OSError, ValueError),
        help="list a job's versions on the persistent tier, with their names",
        description="List the complete versions of a job on the persistent tier, newest first: training, version, "
        "ranks, size, when it was saved, and the names that protect it from removal (Checkpointer.keep). Reads the "
        "directory only: the job may have ended long ago.",
    )
    parser.add_argument(
        "what", metavar="JOBID|DIR", help="job id, array task (10_3), or the directory of a job or a training"
    )
    frame.add_tier(parser)
    frame.add_json(parser, "print one JSON document (schema 1)")
    frame.add_config(parser)


def run(args: argparse.Namespace) -> frame.Result:
    """List the versions."""
    found = list_versions(find_directory(args.what, args.tier, args.config))
    return frame.Result({"schema": SCHEMA, "versions": found}, lambda _: _format_versions(found))


def list_versions(path: str) -> list[dict[str, Any]]:
    """Return all whole versions below a job's or a training's directory. Raises ValueError, OSError."""
    from gemini_hpc.core.numbers import TRAINING_NAME
    from gemini_hpc.tier import find, names, version

    find.check_directory(path)
    below = [f"{path}/{entry}" for entry in sorted(os.listdir(path)) if TRAINING_NAME.fullmatch(entry)]
    found = []
    for directory in [path] if version.list_stamps(path) else below:
        for manifest in version.list_whole(directory) if os.path.isdir(directory) else ():
            where = f"{directory}/{version.format_name(manifest.stamp)}"
            found.append(
                {
                    "training": manifest.training,
                    "version": list(manifest.stamp),
                    "ranks": manifest.world,
                    "bytes": sum(file.bytes for file in manifest.files),
                    "time": manifest.time,
                    "kept": os.path.lexists(f"{where}/{version.KEPT}"),
                    "rejected": os.path.lexists(f"{where}/{version.REJECTED}"),
                    "names": sorted(names.read_version_names(where)),
                    "where": where,
                }
            )
    return found


def _format_versions(found: list[dict[str, Any]]) -> str:
    rows = [("TRAINING", "VERSION", "RANKS", "SIZE", "SAVED", "NAMES")]
    for v in found:
        named = ", ".join(v["names"]) or ("(stays)" if v["kept"] else "")
        named = f"{named} (rejected)".strip() if v["rejected"] else named
        size, saved = f"{v['bytes'] / 1e6:.1f} MB", format_time(v["time"])
        rows.append((v["training"], str(v["version"][1]), str(v["ranks"]), size, saved, named))
    return "\n".join(align(rows)) if found else "no complete version is there"
