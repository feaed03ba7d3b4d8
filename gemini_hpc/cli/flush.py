"""The verb `flush JOBID`: write a job's replicas from memory to its persistent tier now."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from gemini_hpc.cli import frame
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    from gemini_hpc.wire.flush import Flushing


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "flush",
        run,
        "gemini-hpc flush 42",
        help="write a job's newest version to its persistent tier now",
        description="Write the newest sealed version of a job to its persistent tier (--gemini-tier) now, and wait "
        "until it is there. The training goes on meanwhile. For a job that waits for nodes, its "
        "former nodes write the version from their memory. For the job's owner, root and SlurmUser.",
        epilog="Exit status: 0 if every training of the job was written; otherwise prints the reason and exits 1.",
    )
    frame.add_job(parser)
    frame.add_json(parser, "print one JSON document at the end")
    frame.add_config(parser)


def run(args: argparse.Namespace) -> frame.Result:
    """Flush the job. The exit status is 1 if a training was not written."""
    from gemini_hpc.query import ask

    settings, job = frame.find_job(args)
    over = ask.flush(settings, job, _show_progress if sys.stderr.isatty() else lambda word: None)
    failed = [word for word in over if word.reason]
    for word in failed:
        prefix = f"training {word.training}: " if word.training else ""
        frame.print_error("flush", f"job {job}: {prefix}{sanitize(word.reason)}")
    document = {"schema": 1, "job": job, "trainings": [_as_document(word) for word in over]}
    return frame.Result(
        document, lambda _: "\n".join(_describe_flush(word) for word in over if not word.reason), int(bool(failed))
    )


def _describe_flush(word: Flushing) -> str:
    version = f"version {word.stamp[0]}:{word.stamp[1]}"
    return f"training {sanitize(word.training)}: {version} is in {sanitize(word.where)}"


def _show_progress(word: Flushing) -> None:
    what = f"version {word.stamp.epoch}:{word.stamp.version}, {word.bytes / 1e6:.0f} MB written"
    frame.overwrite_line("" if word.over else f"training {sanitize(word.training)}: {what}")


def _as_document(word: Flushing) -> dict[str, object]:
    return {
        "training": word.training,
        "version": list(word.stamp) if word.stamp[1] else None,
        "where": word.where or None,
        "reason": word.reason or None,
    }
