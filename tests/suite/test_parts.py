"""The parts of `make test-all` hold each test file once, neighbours together, in about equal times."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import parts


def test_each_test_file_is_in_exactly_one_part() -> None:
    there = [path.relative_to(parts.TESTS).as_posix() for path in parts.TESTS.rglob("test_*.py")]
    count = parts.PARTS
    assert list(chain.from_iterable(parts.part(f"{k}/{count}") for k in range(1, count + 1))) == sorted(there)


def test_no_part_takes_longer_than_twenty_minutes() -> None:
    measured = parts.read()
    times = [sum(parts.costs(names, measured)) + parts.START_S for names in parts.split(parts.files(), measured)]
    assert max(times) <= 20 * 60, f"{[round(t) for t in times]} s: raise PARTS in tests/parts.py"


def test_no_file_is_measured_that_is_not_there() -> None:
    assert set(parts.read()) <= set(parts.files()), "make test-all RECORD=1 writes tests/durations.json anew"


@given(st.lists(st.floats(0, 1000), max_size=30), st.integers(1, 8))
def test_parts_are_neighbours_and_the_longest_is_short(seconds: list[float], count: int) -> None:
    names = [f"{n:03}" for n in range(len(seconds))]
    measured = {name: {"alone": s} for name, s in zip(names, seconds, strict=True)}
    found = parts.split(names, measured, count)
    assert len(found) == count and list(chain.from_iterable(found)) == names
    longest = max(sum(parts.costs(part, measured)) for part in found)
    assert longest <= sum(seconds) / count + max(seconds, default=0.0) + 0.01


def test_workers_share_what_is_not_alone() -> None:
    shared = 6.0 * parts.WORKERS["work"], 4.0 * parts.WORKERS["cluster"]
    assert parts.wall_s({"work": shared[0], "cluster": shared[1], "alone": 3.0}) == 6 + 4 + 3
    assert parts.costs(["a", "b", "c"], {"a": {"alone": 2.0}, "b": {"alone": 4.0}}) == [2, 4, 3]


@pytest.mark.parametrize("spec", ["", "1", "0/6", "7/6", "a/6", "1/0", "-1/6", "1/6/2"])
def test_a_part_that_is_none(spec: str) -> None:
    with pytest.raises(ValueError, match="such as 2/"):
        parts.part(spec)


def test_a_record_keeps_what_was_not_run_and_drops_what_is_gone(tmp_path: Path) -> None:
    path, (first, second, *_) = tmp_path / "durations.json", parts.files()
    path.write_text(json.dumps({first: {"work": 9.0, "alone": 1.0}, "gone/test_x.py": {"work": 5.0}}))
    parts.record([(first, "work", 1.04), (first, "work", 2.0), (second, "cluster", 7.0)], path)
    assert parts.read(path) == {first: {"alone": 1.0, "work": 3.0}, second: {"cluster": 7.0}}
