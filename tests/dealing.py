"""The order in which the workers of pytest-xdist get the test files: what takes longest first.

Most of a test's time is waiting (for Slurm, for time-outs), so a second and a third worker cost little CPU. A file
stays with one worker: its clusters are started once. At the end there are small files left to deal, not a long one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

# Seconds a test takes, about, with two cores. Only the order of the files follows from it.
SECONDS = {
    "e2e": 35.0,
    "recovery": 22.0,
    "memory": 8.0,
    "control": 5.0,
    "hostile": 4.0,
    "devcluster": 3.0,
    "train": 2.5,
    "doctor": 2.0,
    "leaks": 2.0,
    "spank": 1.0,
    "prolog": 0.7,
    "core": 0.3,
    "agent": 0.3,
}
OTHERS_S = 0.05
# A test that asks for nothing else has no cluster, no node and no agent.
CHEAP = {"request", "tmp_path", "monkeypatch", "capsys", "no_leaks"}


def seconds(item: pytest.Item) -> float:
    """What a test takes, about."""
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
