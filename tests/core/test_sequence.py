"""The place of a training among those of its name (`core.sequence`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.numbers import TRAINING_NAME
from gemini_hpc.core.sequence import MAX_KEPT, Closed, Closing, Place, find_step, merge_closed


def closed(name: str, series: str = "a", restart: int = 0, version: int = 9) -> Closed:
    return Closed(name, version, restart, series)


def part(ranks: tuple[int, ...], *, series: str = "a", epoch: int = 1, version: int = 9) -> Closing:
    return Closing("default", 4, ranks, version, 0, series, epoch)


@given(st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z"), st.integers(1, 9999), st.integers(1, 9999))
def test_a_place_has_one_name(name: str, step: int, nth: int) -> None:
    place = Place(name, step, nth)
    assert Place.parse(place.training_name) == place and TRAINING_NAME.fullmatch(place.training_name)
    assert (place.training_name == name) == (step == nth == 1)


@pytest.mark.parametrize("name", ["a+", "a+1", "a+0.1", "a+1.0", "a+01.1", "a+1.2.3", "+1.2", "a+1.12345"])
def test_no_other_sets(name: str) -> None:
    assert not TRAINING_NAME.fullmatch(name)


def test_closed_by_all_ranks_of_one_launch() -> None:
    assert merge_closed((), [part((0, 1)), part((2,))]) == ()
    assert merge_closed((), [part((0, 1)), part((2, 3), epoch=2)]) == (), "of two launches"
    assert merge_closed((), [part((0, 1)), part((2, 3), series="b")]) == ()
    assert merge_closed((), [part((0, 1), version=8), part((2, 3))]) == (closed("default"),)
    assert merge_closed([closed("default", version=9)], [part((0, 1))]) == (closed("default"),)


def test_the_last_time_counts() -> None:
    older, newer = closed("default", "a", 0, 12), closed("default", "b", 1, 9)
    assert merge_closed([newer, older]) == merge_closed([older, newer]) == (newer,)
    assert merge_closed([closed("default", "", 5), older]) == (older,), "another job's is older than all"


def test_no_more_than_can_be_sent() -> None:
    many = [closed(f"t{number}", restart=number) for number in range(MAX_KEPT + 9)]
    assert merge_closed(many) == tuple(many[9:])


def test_the_first_step() -> None:
    assert find_step("default", "a", 0, [], []) == 1
    assert find_step("default", "b", 0, [], ["default"]) == 1, "what is not closed goes on"
    assert find_step("default", "a", 1, [closed("default")], ["default"]) == 1, "a requeued script begins with it"
    assert find_step("other", "b", 0, [closed("default")], []) == 1, "each name is counted by itself"
    assert find_step("default", "b", 0, [closed("default", "")], []) == 1, "another job's step is none of this one's"


def test_the_next_step() -> None:
    done = [closed("default"), closed("default+1.2")]
    assert find_step("default", "b", 0, done, ["default", "default+1.2"]) == 2
    assert find_step("default", "a", 0, done, ["default", "default+1.2"]) == 1, "started again"
    assert find_step("default", "b", 0, done, ["default+1.2", "default+1.3"]) == 1, "it had begun a third"
    assert find_step("default", "c", 0, [*done, closed("default+2.1", "b")], []) == 3
    assert find_step("default", "b", 0, [*done, closed("default+2.1", "b")], ["default+2.2"]) == 2


def test_a_requeued_step_that_has_not_closed_all_again() -> None:
    """The first incarnation had closed two trainings in its first step; the second one has come to the second."""
    known = [closed("default", "a", 1), closed("default+1.2", "a", 0)]
    assert find_step("default", "b", 1, known, ["default", "default+1.2"]) == 1
