from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.slots import Refused, Slot, SlotPair, Stamp

NONE: frozenset[Stamp] = frozenset()


def v(version: int, epoch: int = 0) -> Stamp:
    return Stamp(epoch, version)


def pair_of(*contents: tuple[str, Stamp] | None) -> SlotPair:
    slots = [Slot() if content is None else Slot(content[0], content[1], "d", 1) for content in contents]  # type: ignore[arg-type]
    pair = SlotPair(slots)
    pair.high = pair.find_newest()
    return pair


def begin(pair: SlotPair, stamp: Stamp, sealed: Stamp | None = None, abandoned: frozenset[Stamp] = NONE) -> int:
    """As an agent does it that has voted for everything that is complete."""
    return pair.begin_version(stamp, sealed, abandoned, voted=pair.list_complete_stamps())


def test_a_life_of_three_versions() -> None:
    pair = SlotPair()
    assert begin(pair, v(1)) == 0
    pair.complete_slot(0, v(1), "one", 10)
    assert begin(pair, v(2)) == 1
    pair.complete_slot(1, v(2), "two", 20)
    with pytest.raises(Refused, match=r"neither 0\.1 nor 0\.2 is sealed"):
        begin(pair, v(3))
    with pytest.raises(Refused, match=r"0\.2 is complete and reported, but not yet sealed or abandoned"):
        begin(pair, v(3), sealed=v(1))
    assert begin(pair, v(3), sealed=v(2)) == 0
    assert pair.list_complete_stamps() == {v(2)}
    assert (pair.find_newest(), pair.find_slot(v(3)), pair.find_slot(v(1))) == (v(3), 0, None)
    assert pair.slots[1] == Slot("complete", v(2), "two", 20)


def test_the_sealed_slot_stays_even_when_it_is_the_newer_one() -> None:
    """R1's 'that version, or a later one, is sealed', read of the other slot alone, would give this one away."""
    pair = pair_of(("complete", v(5)), ("complete", v(4)))
    assert begin(pair, v(6), sealed=v(5)) == 1


def test_an_abandoned_version_gives_way_and_the_older_one_stays() -> None:
    pair = pair_of(("complete", v(4)), ("complete", v(5)))
    assert begin(pair, v(6), sealed=v(4), abandoned=frozenset({v(5)})) == 1
    first = pair_of(("complete", v(1)), ("complete", v(2)))  # nothing was ever sealed
    assert begin(first, v(3), abandoned=frozenset({v(1), v(2)})) == 1


def test_what_was_never_voted_for_gives_way_if_the_other_is_sealed() -> None:
    pair = pair_of(("complete", v(4)), ("complete", v(5)))
    assert pair.begin_version(v(6), v(4), NONE, voted=frozenset({v(4)})) == 1
    pair = pair_of(("complete", v(4)), ("complete", v(5)))
    with pytest.raises(Refused):
        pair.begin_version(v(6), None, NONE, voted=NONE)


def test_the_same_writer_refills_its_own_slot() -> None:
    pair = pair_of(("filling", v(5)), None)
    assert begin(pair, v(6)) == 0
    with pytest.raises(ValueError, match=r"it cannot complete 0\.5"):
        pair.complete_slot(0, v(5), "late", 1)


def test_a_restored_version_is_left_alone_until_it_is_overtaken() -> None:
    pair = pair_of(("filling", v(5)), None)
    assert begin(pair, v(6, epoch=1)) == 1
    pair.complete_slot(1, v(6, 1), "d", 1)
    with pytest.raises(Refused, match=r"0\.5 is still being restored"):
        begin(pair, v(7, 1), sealed=v(5))
    assert begin(copy.deepcopy(pair), v(7, 1), sealed=v(6, 1)) == 0
    assert begin(copy.deepcopy(pair), v(7, 1), abandoned=frozenset({v(5)})) == 0
    pair.complete_slot(0, v(5), "restored", 1)
    assert pair.list_complete_stamps() == {v(5), v(6, 1)}


def test_nothing_goes_back() -> None:
    pair = pair_of(("complete", v(4)), None)
    begin(pair, v(6))
    pair.empty_filling()
    with pytest.raises(Refused, match=r"0\.5 is older than 0\.6, which was already begun"):
        begin(pair, v(5))
    assert begin(pair, v(6)) == 1  # the same version may be tried again
    for stamp, state in ((v(6), "filling"), (v(4), "complete")):
        with pytest.raises(Refused, match=f"already {state}"):
            begin(pair, stamp)


def test_recovery_keeps_what_the_plan_says() -> None:
    pair = pair_of(("complete", v(5)), ("complete", v(6)))
    assert pair.empty_except(v(6), v(5)) == ()
    assert pair.empty_except(v(5)) == (v(6),)
    assert begin(pair, v(5 + 1, epoch=1)) == 1
    assert pair.empty_except(v(5)) == (v(6, 1),)
    assert pair.high == v(5)
    half = pair_of(("filling", v(5)), ("complete", v(4)))
    assert half.empty_except(v(5)) == (v(5), v(4))  # half a copy of the chosen version is no copy
    assert begin(half, v(5)) == 0


stamps = st.builds(Stamp, st.integers(0, 2), st.integers(1, 6))
trainings = st.frozensets(stamps, max_size=4)


@given(
    st.lists(st.tuples(st.sampled_from(["empty", "filling", "complete"]), stamps), min_size=2, max_size=2),
    stamps,
    st.none() | stamps,
    trainings,
    trainings,
)
def test_whatever_is_asked(
    contents: list[tuple[str, Stamp]],
    stamp: Stamp,
    sealed: Stamp | None,
    abandoned: frozenset[Stamp],
    voted: frozenset[Stamp],
) -> None:
    if contents[0][1] == contents[1][1]:
        return
    pair = pair_of(*(None if state == "empty" else (state, held) for state, held in contents))
    before = copy.deepcopy(pair)
    try:
        index = pair.begin_version(stamp, sealed, abandoned, voted=voted)
    except Refused as refused:
        assert pair == before
        assert refused.reason
        return
    recycled, other = before.slots[index], before.slots[1 - index]
    assert pair.slots[index] == Slot("filling", stamp)
    assert pair.slots[1 - index] == other
    assert all(held < stamp for held in before.list_complete_stamps())
    if recycled.state == "complete":
        assert recycled.stamp is not None and other.stamp is not None
        assert other.state == "complete"
        assert recycled.stamp != sealed
        assert recycled.stamp not in voted - abandoned or (sealed is not None and recycled.stamp < sealed)
        if recycled.stamp < other.stamp:
            assert sealed is not None and other.stamp <= sealed
        else:
            assert recycled.stamp in abandoned or (sealed is not None and other.stamp <= sealed)


def test_what_the_writer_skips_is_not_begun_any_more() -> None:
    pair = SlotPair()
    begin(pair, v(3))
    pair.pass_over(v(5))
    assert pair.floor == v(5)
    for gone in (4, 5):
        with pytest.raises(Refused, match="is not newer than"):
            begin(pair, v(gone))
    pair.pass_over(v(4))
    assert pair.floor == v(5), "it is not taken back"
    begin(pair, v(6))
    pair.pass_over(v(6))
    assert pair.passed == v(5), "what is being filled is not skipped"
    pair.empty_except()
    assert pair.floor is None
