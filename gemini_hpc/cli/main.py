"""The command `gemini-hpc`: one module per verb; a user's mistake prints one line, never a traceback."""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
from contextlib import suppress
from typing import TextIO

from gemini_hpc import __version__

_OF_JOBS = ("jobs", "inspect", "report", "node", "flush", "evacuate", "requeue", "versions", "export", "run")
VERBS = (*_OF_JOBS, "controller", "doctor", "install", "plan", "simulate", "devcluster", "demo")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all verbs."""
    parser = argparse.ArgumentParser(
        prog="gemini-hpc",
        description="In-memory checkpoint replicas for training jobs on Slurm: "
        "a node dies, the job goes on from its peers' memory.",
    )
    parser.add_argument("--version", action="version", version=f"gemini-hpc {__version__}")
    parser.set_defaults(func=lambda _: print(parser.format_help(), end="") or 0)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for verb in VERBS:
        importlib.import_module(f"gemini_hpc.cli.{verb}").register(verbs)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    try:
        try:
            args = build_parser().parse_args(argv)
        finally:
            sys.stdout.flush()  # from Python 3.13 on, argparse hides a failure to write its help
        status: int = args.func(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _close_streams(sys.stdout, sys.stderr)
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        _close_streams(sys.stdout)
        print(f"gemini-hpc: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _close_streams(*streams: TextIO) -> None:
    """Close streams and ignore errors, because their remaining output cannot be written."""
    for stream in streams:
        with suppress(OSError):
            stream.close()


if __name__ == "__main__":
    sys.exit(main())
