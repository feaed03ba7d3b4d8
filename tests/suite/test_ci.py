"""CI runs the parts that a change touches, the largest change first, and one more by turns."""

from __future__ import annotations

import pytest

from tests import ci, parts

SPLIT = [["agent/test_a.py", "cli/test_b.py"], ["node/test_c.py"], ["train/test_d.py"], ["train/test_e.py"]]


def numbers(changed: dict[str, int], commits: int = 0) -> list[int]:
    return [number for number, _ in ci.order(changed, SPLIT, commits)]


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, [1]),
        ({"gemini_hpc/train/x.py": 5}, [3, 4, 1]),
        ({"tests/train/test_e.py": 5}, [4, 1]),
        ({"tests/train/conftest.py": 1, "prolog_epilog/prolog": 9}, [2, 3, 4, 1]),
        ({"gemini_hpc/agent/a.py": 1, "gemini_hpc/cli/b.py": 2}, [1]),
        ({"README.md": 7, "gemini_hpc/clock.py": 7}, [1]),
    ],
)
def test_touched_parts_come_first(changed: dict[str, int], wanted: list[int]) -> None:
    assert numbers(changed) == wanted


def test_every_part_has_its_turn() -> None:
    assert [numbers({}, commits) for commits in range(5)] == [[1], [2], [3], [4], [1]]


def test_every_package_is_owned_by_a_directory_of_tests() -> None:
    """A package whose change no part would run is a gap in CI."""
    rooms = {name.partition("/")[0] for name in parts.files()}
    top = parts.TESTS.parent
    packages = [path.parent for path in (top / "gemini_hpc").glob("*/__init__.py")]
    for path in [*packages, top / "slurm", top / "prolog_epilog", top / "examples"]:
        assert ci.room(f"{path.relative_to(top)}/x.py") in rooms, (
            f"{path.name}: name its tests in ROOMS of tests/ci.py"
        )
