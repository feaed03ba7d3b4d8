"""The parts of `make test-all`: runs of neighbouring test files of about equal time, cut by measured seconds.

`make test-all RECORD=1` measures: it writes durations.json. A file that is not in it counts with the median.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DURATIONS = TESTS / "durations.json"
# Workers of pytest-xdist for each kind of test. A training has two ranks, one for each core; a cluster mostly waits.
WORKERS = {"work": 2, "cluster": 3, "alone": 1}
# What a part costs before its first test: starting pytest for each kind, and its workers' imports of torch.
START_S = 30.0
PARTS = 6

Seconds = Mapping[str, float]  # by kind of test, added up over workers


def files() -> list[str]:
    """Return all test files, sorted, relative to tests/."""
    return sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))


def read(path: Path = DURATIONS) -> dict[str, Seconds]:
    """Return the measured seconds of each test file; {} where none have been measured."""
    found: dict[str, Seconds] = json.loads(path.read_text()) if path.exists() else {}
    return found


def record(reports: Iterable[tuple[str, str, float]], path: Path = DURATIONS) -> None:
    """Write what a run measured over what `path` has of these files and kinds.

    Args:
        reports: file relative to tests/, kind of the test, seconds of one of its phases.
    """
    total: dict[tuple[str, str], float] = defaultdict(float)
    for file, kind, seconds in reports:
        total[file, kind] += seconds
    measured: dict[str, dict[str, float]] = defaultdict(dict)
    for (file, kind), seconds in total.items():
        measured[file][kind] = round(seconds, 1)
    known, there = {**read(path)}, set(files())
    for file, kinds in measured.items():
        known[file] = {**known.get(file, {}), **kinds}
    kept = {file: dict(sorted(known[file].items())) for file in sorted(known) if file in there}
    lines = [f"{json.dumps(file)}: {json.dumps(kinds)}" for file, kinds in kept.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def wall_s(kinds: Seconds) -> float:
    """Return how long a file takes, in seconds, where its tests share the workers of their kind."""
    return sum(seconds / WORKERS[kind] for kind, seconds in kinds.items())


def costs(names: Sequence[str], measured: Mapping[str, Seconds]) -> list[float]:
    """Return the seconds of each file."""
    known = {name: wall_s(measured[name]) for name in names if name in measured}
    usual = statistics.median(known.values()) if known else 1.0
    return [known.get(name, usual) for name in names]


def split(names: Sequence[str], measured: Mapping[str, Seconds], count: int = PARTS) -> list[list[str]]:
    """Return `count` parts of neighbouring files, the longest of which is as short as it can be."""
    seconds = costs(names, measured)
    until = [0.0]
    for cost in seconds:
        until.append(until[-1] + cost)
    low, high = max(seconds, default=0.0), until[-1]
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_cut(until, middle)) <= count else (middle, high)
    cuts = [0, *_cut(until, high), *[len(names)] * count][: count + 1]
    return [list(names[start:end]) for start, end in pairwise(cuts)]


def _cut(until: Sequence[float], most_s: float) -> list[int]:
    """Return where each part ends if none may take longer."""
    ends, begin = [], 0
    for index in range(1, len(until)):
        if until[index] - until[begin] > most_s and index - 1 > begin:
            ends.append(begin := index - 1)
    return [*ends, len(until) - 1]


def part(spec: str) -> list[str]:
    """Return the files of the part that `k/n` names.

    Raises:
        ValueError: `spec` names no part; the text says what was wanted.
    """
    number, _, count = spec.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"PART={spec}: a part is k/n with 1 <= k <= n, such as 2/{PARTS}")
    return split(files(), read(), int(count))[int(number) - 1]


def longest_first(names: Iterable[str], measured: Mapping[str, Seconds]) -> list[str]:
    """Return the files in the order in which workers take them, so that small ones are left at the end."""
    order = list(names)
    seconds = dict(zip(order, costs(order, measured), strict=True))
    return sorted(order, key=lambda name: (-seconds[name], name))
