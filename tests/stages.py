"""`python -m tests.stages`: the test commands of the Makefile, each in stages of which no two overlap.

    python -m tests.stages quick                              # what any user's machine passes: `make check`
    python -m tests.stages test                               # every promise once: `make test`
    python -m tests.stages all [--part k/n | PATH ...]        # all tests but the campaigns: `make test-all`

What has real time runs beside nothing of another kind: trainings keep both cores busy, and clusters wait for timers.
A stage that fails does not keep the later ones from running. No test is run twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests import parts, promises

ROOT = parts.TESTS.parent
PASSED, NO_TESTS = 0, 5  # pytest's exit codes
STEADY = "--hypothesis-profile=steady"


@dataclass(frozen=True)
class Stage:
    """One call of pytest: what it shows, on which tests, by how many workers."""

    what: str
    options: tuple[str, ...]
    paths: Sequence[str]
    workers: int

    def command(self) -> list[str]:
        deal = ["-n", str(self.workers), "--dist", "loadfile", "--no-loadscope-reorder"] if self.workers > 1 else []
        return [sys.executable, "-m", "pytest", "-q", "--durations=10", *deal, *self.options, *self.paths]


QUICK = Stage("the quick tests", ("--quick", STEADY), ["tests"], 3)  # a third waits where two do


def of_test() -> list[Stage]:
    """Return the stages of `make test`."""
    witnesses = promises.marked("witness")
    files = {real: sorted({f"tests/{w.file}" for w in witnesses if w.is_cluster is real}) for real in (False, True)}
    return [
        QUICK,
        Stage("promises, by trainings and simulations", ("-m", "witness and not cluster", STEADY), files[False], 2),
        Stage("promises, on real clusters", ("-m", "witness and cluster", STEADY), files[True], 2),
    ]


def of_all(paths: Sequence[str], options: Sequence[str]) -> list[Stage]:
    """Return the stages of `make test-all` for these files and directories."""
    kinds = [
        ("work", "everything but clusters", "not cluster and not alone and not long"),
        ("cluster", "real clusters", "cluster and not alone and not long"),
        ("alone", "what other work would disturb", "alone and not long"),
    ]
    return [Stage(what, ("-m", mark, *options), paths, parts.WORKERS[kind]) for kind, what, mark in kinds]


def run(stages: Sequence[Stage]) -> int:
    """Run the stages, print a line before each and a table at the end, and return the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background, and so by what tests start
    lines, code = [], 0
    for number, stage in enumerate(stages, 1):
        many = f"{stage.workers} workers" if stage.workers > 1 else "one after the other"
        print(f"\n=== stage {number} of {len(stages)}: {stage.what} ({many})", flush=True)
        began = time.monotonic()
        status = subprocess.run(stage.command(), cwd=ROOT, check=False).returncode
        passed = status in (PASSED, NO_TESTS)
        code = code if passed else 1
        words = "no tests" if status == NO_TESTS else "passed" if passed else f"FAILED ({status})"
        load = os.getloadavg()[0]
        lines.append(f"{time.monotonic() - began:6.0f} s  {words:10}  load {load:4.1f}  {stage.what}")
    print("\n=== " + "\n    ".join(["stages", *lines]), flush=True)
    return code


def main(argv: Sequence[str]) -> int:
    """Run one of the commands; 2 for words that name no tests."""
    parser = argparse.ArgumentParser(prog="python -m tests.stages", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["quick", "test", "all"])
    parser.add_argument("paths", nargs="*", help="files or directories, as they are called below tests/")
    parser.add_argument("--part", help="k/n: one of n parts of equal time")
    parser.add_argument("--record", action="store_true", help="write the times to tests/durations.json")
    parser.add_argument("--seed", type=int, help="of hypothesis; default: random")
    args = parser.parse_intermixed_args(argv)
    if args.part and args.record:
        parser.error("new times move the cuts between parts: record all tests, or files and directories")
    if args.command != "all":
        return run([QUICK] if args.command == "quick" else of_test())
    try:
        names = parts.part(args.part) if args.part else args.paths or parts.files()
    except ValueError as exc:
        parser.error(str(exc))
    paths = [f"tests/{name.removeprefix('tests/')}" for name in names]
    if missing := [path for path in paths if not (ROOT / path.partition("::")[0]).exists()]:
        parser.error(f"there is no {missing[0]}")
    seed = args.seed if args.seed is not None else random.randrange(1 << 32)
    print(f"hypothesis draws with --seed {seed}", flush=True)
    return run(of_all(paths, [f"--hypothesis-seed={seed}", *(["--record"] if args.record else [])]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
