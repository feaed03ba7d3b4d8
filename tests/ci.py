"""`python -m tests.ci`: the parts of `make test-all` that a change touches, and one more; the end of `.ci/run`.

A part is touched if it holds a test file of the change, or tests of a package of the change. The largest change comes
first. One more part, number (commits mod parts), lets neighbouring changes see everything. A part that does not fit
into BUDGET_S is named, and has to be run by hand.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tests import parts

BUDGET_S = 40 * 60.0
# A session's work: what lies this far back has passed before.
SINCE = "4 hours ago"
# The tests of a place that are not called as their directory is.
ROOMS = {
    "slurm": "spank",
    "prolog_epilog": "node",
    "gemini_hpc/slurm": "controller",
    "gemini_hpc/query": "controller",
    "gemini_hpc/client": "controller",
    "gemini_hpc/format": "tier",
}


def git(*words: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *words], cwd=parts.TESTS.parent, check=True, capture_output=True, text=True).stdout


def changed_lines() -> dict[str, int]:
    """Return how many lines of each file the change touches."""
    base = git("rev-list", "-1", f"--before={SINCE}", "HEAD").strip()
    rows = [line.split("\t") for line in git("diff", "--numstat", "--no-renames", base or "HEAD").splitlines()]
    return {path: int(added) + int(removed) for added, removed, path in rows if added != "-"}


def room(path: str) -> str:
    """Return the directory of tests, relative to tests/, that owns a file of the project; "" for none."""
    place = path.split("/")
    if len(place) > 2 and place[0] in ("tests", "gemini_hpc"):
        return ROOMS.get("/".join(place[:2]), place[1])
    return ROOMS.get(place[0], place[0] if place[0] in ("examples", "benchmarks", "docs") else "")


def weight(names: Sequence[str], changed: Mapping[str, int]) -> dict[str, int]:
    """Return how many changed lines a part owns, by room. A test file is owned by its own part alone."""
    rooms = {name.partition("/")[0] for name in names}
    found: dict[str, int] = {}
    for path, lines in changed.items():
        is_test = path.rpartition("/")[2].startswith("test_") and path.startswith("tests/")
        if path.removeprefix("tests/") in names if is_test else room(path) in rooms:
            found[room(path)] = found.get(room(path), 0) + lines
    return found


def order(changed: Mapping[str, int], split: Sequence[Sequence[str]], commits: int) -> list[tuple[int, str]]:
    """Return the numbers of the parts to run, from 1, in this order, each with its reason."""
    weights = {number: weight(names, changed) for number, names in enumerate(split, 1)}
    touched = sorted((n for n in weights if weights[n]), key=lambda n: (-sum(weights[n].values()), n))
    found = [
        (n, f"the change touches {', '.join(sorted(weights[n]))} ({sum(weights[n].values())} lines)") for n in touched
    ]
    turn = commits % len(split) + 1
    return found if turn in touched else [*found, (turn, f"its turn: {commits} commits mod {len(split)}")]


def main() -> int:
    """Run the parts that fit; 1 if one of them fails."""
    measured = parts.read()
    split = parts.split(parts.files(), measured)
    began, code, left = time.monotonic(), 0, ["parts that do not fit into CI, to be run by hand:"]
    for number, why in order(changed_lines(), split, int(git("rev-list", "--count", "HEAD"))):
        spec, expected_s = f"{number}/{len(split)}", parts.START_S + sum(parts.costs(split[number - 1], measured))
        if time.monotonic() - began + expected_s > BUDGET_S:
            left.append(f"make test-all PART={spec}   # {why}; about {expected_s / 60:.0f} min")
            continue
        print(f"\n=== part {spec}: {why}; about {expected_s / 60:.0f} min", flush=True)
        command = [sys.executable, "-m", "tests.stages", "all", "--part", spec]
        code |= subprocess.run(command, cwd=parts.TESTS.parent, check=False).returncode != 0
    print("\n=== " + ("\n    ".join(left) if len(left) > 1 else "every touched part ran"))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
