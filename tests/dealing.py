"""The order in which the workers of pytest-xdist get the test files: what takes longest first.

Most of a test's time is waiting (for Slurm, for time-outs), so a second and a third worker cost little CPU. A file
stays with one worker: its clusters are started once. At the end there are small files left to deal, not a long one.
What a run tells at its end (`taken`) says where that is not so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest

# Seconds a test takes, about, with two cores, by directory or by file. Only the order of the files follows from it:
# a file is named here where its tests take much longer than their neighbours do.
SECONDS = {
    "e2e": 35.0,
    "recovery": 22.0,
    "memory": 8.0,
    "controller": 12.0,
    "controller/test_operators_of_slurmdbd.py": 30.0,
    "controller/test_site_killed.py": 150.0,
    "hostile": 4.0,
    "devcluster": 3.0,
    "train": 2.5,
    "train/test_kills.py": 80.0,
    "train/test_traffic.py": 25.0,
    "train/test_host.py": 9.0,
    "train/test_resume.py": 8.0,
    "train/test_faults.py": 6.0,
    "doctor": 2.0,
    "leaks": 2.0,
    "spank": 1.0,
    "node": 0.7,
    "core": 0.3,
    "agent": 0.3,
}
OTHERS_S = 0.05
# A test that asks for nothing else has no cluster, no node and no agent.
CHEAP = {"request", "tmp_path", "tmp_path_factory", "monkeypatch", "capsys", "no_leaks", "no_leaks_of_a_file"}


def seconds(item: pytest.Item) -> float:
    """What a test takes, about."""
    if (file := "/".join(item.path.parts[-2:])) in SECONDS:
        return SECONDS[file]
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    wanted = set(getattr(item, "fixturenames", ())) - CHEAP - set(parameters)
    known = [SECONDS[part] for part in item.path.parts if part in SECONDS]
    return known[-1] if wanted and known else OTHERS_S


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The same items, their files in the order of the time they are expected to take; the same in every worker."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    order = sorted(files, key=lambda path: (-sum(map(seconds, files[path])), path))
    return [item for path in order for item in files[path]]


class Work(NamedTuple):
    """What one worker has done of one test; Unix times in seconds."""

    worker: str
    test: str
    start: float
    end: float


def taken(work: Sequence[Work], most: int = 12) -> list[str]:
    """Lines that tell which files took longest, and for how long each worker had nothing to do at the end."""
    began, over = min(w.start for w in work), max(w.end for w in work)
    files: dict[str, list[Work]] = defaultdict(list)
    ends: dict[str, float] = defaultdict(float)
    for w in work:
        files[w.test.partition("::")[0]].append(w)
        ends[w.worker] = max(ends[w.worker], w.end)
    lengths = {file: sum(w.end - w.start for w in parts) for file, parts in files.items()}
    lines = [
        f"{lengths[file]:6.0f} s  {file}, {len({w.test for w in files[file]})} tests, by {files[file][0].worker}, "
        f"over after {max(w.end for w in files[file]) - began:.0f} s"
        for file in sorted(files, key=lambda file: -lengths[file])[:most]
    ]
    idle = ", ".join(f"{worker} {over - end:.0f} s" for worker, end in sorted(ends.items()))
    return [*lines, f"idle at the end: {idle}"]
