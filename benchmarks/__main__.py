"""`python -m benchmarks [--only FAMILY] [--runs N] [--tiny] [--json FILE]`: measure, print a table, keep the figures.

Exit status: 0 if everything could be measured, also where a bar is missed; 1 if something could not; 2 for a wrong
command line.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from benchmarks.bench import TINY_GB, MeasureError, Options
from benchmarks.families import FAMILIES
from benchmarks.progress import Progress
from benchmarks.rows import Row, store, table
from gemini_hpc.devcluster.errors import DevclusterError


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that clusters are taken down


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures this project's speed on development clusters (needs root) and compares it with the "
        "project's bars. All families take some hours, fig16 one and a half; nothing else should run meanwhile.",
        epilog="Exit status: 0 if all could be measured, also where a bar is missed; 1 if something could not.",
    )
    parser.add_argument(
        "--only", choices=list(FAMILIES), help="one family; the other families' rows in the file stay"
    )
    parser.add_argument("--runs", type=int, default=0, metavar="N", help="runs of each figure (default: by family)")
    parser.add_argument("--json", metavar="FILE", help="where to (default: bench.json; of a tiny run: nowhere)")
    parser.add_argument(
        "--gb", type=float, default=1.0, help="state of a rank in GB (default: %(default)s; less only to try it out)"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="only show that it runs: once, with little state, one job for all set-ups of a family; all figures are "
        "there and say nothing, no bar is looked at",
    )
    args = parser.parse_args()
    if args.runs < 0 or args.gb <= 0:
        parser.error("--runs and --gb must be positive")
    signal.signal(signal.SIGTERM, _terminated)
    progress = Progress()
    options = Options(1, TINY_GB, progress, True) if args.tiny else Options(args.runs, args.gb, progress)
    file = args.json or ("" if args.tiny else "bench.json")
    failed = False
    rows: list[Row] = []
    for family in [args.only] if args.only else FAMILIES:
        progress.say(family, "beginning")
        began = time.monotonic()
        try:
            found = FAMILIES[family].measure(options)
        except (MeasureError, DevclusterError) as error:
            failed = True
            progress.done()
            print(f"benchmarks: {family} could not be measured: {error}", file=sys.stderr)
            continue
        if amiss := FAMILIES[family].amiss(found):
            failed = True
            progress.done()
            print(f"benchmarks: {family}: figures {amiss}", file=sys.stderr)
        rows += found
        if file:
            store(Path(file), found)
        progress.say(family, f"done in {time.monotonic() - began:.0f} s")
    progress.done()
    if rows:
        print(table(rows))
        over = ", ".join(row.id for row in rows if row.ok is False) or "none"
        print(
            f"\n{len(rows)} figures"
            + (" of a tiny run: they say nothing" if args.tiny else f" in {file}; over their bar: {over}")
        )
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
