"""`python -m benchmarks [--only FAMILY] [--runs N] [--json FILE]`: measure, print a table, keep the figures.

Exit status: 0 if everything could be measured, also where a bar is missed; 1 if something could not; 2 for a wrong
command line.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from benchmarks.bench import MeasureError, Options
from benchmarks.progress import Progress
from benchmarks.rows import Row, store, table
from gemini_hpc.devcluster.errors import DevclusterError

# A family's rows have its name before their dot.
FAMILIES = {
    "save": "save",
    "traffic": "traffic",
    "fig16": "interleave",
    "watch": "watch",
    "fig11": "remote",
    "fig13": "models",
    "reft": "reft",
    "holders": "holders",
    "pp": "pipeline",
    "pull": "pull",
    "agent": "agent",
    "prolog": "prolog",
    "inspect": "inspect",
    "recovery": "recovery",
    "launch": "launch",
    "spare": "spare",
    "chaos": "chaos",
    "busy": "busy",
    "tier": "tier",
    "place": "place",
    "xor": "parity",
    "rs": "reed_solomon",
    "disk": "disk",
}


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
    parser.add_argument("--json", default="bench.json", metavar="FILE", help="where to (default: %(default)s)")
    parser.add_argument(
        "--gb", type=float, default=1.0, help="state of a rank in GB (default: %(default)s; less only to try it out)"
    )
    args = parser.parse_args()
    if args.runs < 0 or args.gb <= 0:
        parser.error("--runs and --gb must be positive")
    signal.signal(signal.SIGTERM, _terminated)
    progress = Progress()
    options = Options(args.runs, args.gb, progress)
    failed = False
    rows: list[Row] = []
    for family in [args.only] if args.only else FAMILIES:
        progress.say(family, "beginning")
        began = time.monotonic()
        try:
            found = importlib.import_module(f"benchmarks.{FAMILIES[family]}").measure(options)
        except (MeasureError, DevclusterError) as error:
            failed = True
            progress.done()
            print(f"benchmarks: {family} could not be measured: {error}", file=sys.stderr)
            continue
        rows += found
        store(Path(args.json), found)
        progress.say(family, f"done in {time.monotonic() - began:.0f} s")
    progress.done()
    if rows:
        print(table(rows))
        over = [row.id for row in rows if row.ok is False]
        print(f"\n{len(rows)} figures in {args.json}; over their bar: {', '.join(over) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
