"""`gemini-hpc`: one verb a module; a user's mistake is one line, never a traceback."""

from __future__ import annotations

import argparse
import importlib
import sys

from gemini_hpc import __version__

VERBS = ("jobs", "inspect", "report", "flush", "export", "run", "controller", "doctor", "devcluster", "demo")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs."""
    parser = argparse.ArgumentParser(
        prog="gemini-hpc",
        description="In-memory checkpoint replicas for training jobs on Slurm: "
        "a node dies, the job goes on from its peers' memory.",
    )
    parser.add_argument("--version", action="version", version=f"gemini-hpc {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        importlib.import_module(f"gemini_hpc.cli.{verb}").register(verbs)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb; the exit status."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.func(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    return status


if __name__ == "__main__":
    sys.exit(main())
