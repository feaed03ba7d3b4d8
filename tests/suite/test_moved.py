"""What `make test` leaves to `make test-long` has something in its place, and is there itself."""

from __future__ import annotations

from pathlib import Path

import moved
import pytest
from sim.scenarios import SCENARIOS
from sim.tier_stories import STORIES

TESTS = Path(__file__).parents[1]


def there(test: str) -> bool:
    path, _, name = test.partition("::")
    return f"\ndef {name.partition('[')[0]}(" in (TESTS / path).read_text()


@pytest.mark.parametrize(("test", "instead"), moved.MOVED.items())
def test_both_are_there(test: str, instead: str) -> None:
    assert there(test)
    story = instead.removeprefix("sim:")
    if story != instead:
        assert story in {*SCENARIOS, *STORIES, "campaign"}
    else:
        assert there(instead) and not moved.instead(instead)


def test_parameters_count() -> None:
    assert moved.instead("e2e/test_heat.py::test_a_node_is_cut[pmi2]")
    assert not moved.instead("e2e/test_heat.py::test_a_node_is_cut[pmix]")
    assert moved.instead("recovery/test_node_loss.py::test_odd_sizes[5-2]")


def test_no_two_files_are_the_same_module() -> None:
    """Directories without __init__.py: of two files of one name in them, pytest collects the first alone."""
    loose = [path for path in TESTS.rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.name for path in loose]
    assert sorted(names) == sorted(set(names))
