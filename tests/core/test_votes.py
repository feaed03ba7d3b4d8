from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.slots import Slot, SlotPair, Stamp
from gemini_hpc.core.votes import (
    SILENT,
    Decision,
    Root,
    Vote,
    build_vote,
    find_parent,
    list_children,
    merge_votes,
)


def v(version: int) -> Stamp:
    return Stamp(0, version)


def holding(*complete: int, filling: int | None = None) -> SlotPair:
    slots = [Slot("complete", v(version), "d", 1) for version in complete]
    if filling is not None:
        slots.append(Slot("filling", v(filling)))
    slots += [Slot() for _ in range(2 - len(slots))]
    pair = SlotPair(slots)
    pair.high = pair.find_newest()
    return pair


@st.composite
def pairs(draw: st.DrawFn) -> SlotPair:
    versions = draw(st.lists(st.integers(1, 6), unique=True, max_size=2))
    pair = SlotPair([Slot(draw(st.sampled_from(["complete", "filling"])), v(version)) for version in versions])
    pair.slots += [Slot() for _ in range(2 - len(pair.slots))]
    pair.high = pair.find_newest()
    if draw(st.booleans()):  # something newer was begun and voided
        pair.high = v(draw(st.integers(6, 8)))
    if draw(st.booleans()):
        pair.pass_over(v(draw(st.integers(1, 9))))
    return pair


def test_a_version_is_sealed_when_the_last_member_has_it() -> None:
    root, a = Root(), build_vote([holding(4, 5)])
    root.record_vote(merge_votes([a, SILENT]))
    assert root.decide() == Decision()  # b is silent, not gone (R3)
    root.record_vote(merge_votes([a, build_vote([holding(4, filling=5), holding(4, 5)])]))
    assert root.decide() == Decision(v(4))
    root.record_vote(merge_votes([a, build_vote([holding(4, 5), holding(4, 5)])]))
    assert root.decide() == Decision(v(5))


def test_what_one_has_skipped_is_abandoned_for_all() -> None:
    """Neither vote alone shows it: A has 5, B has gone from 4 to 6."""
    a, b = build_vote([holding(4, 5)]), build_vote([holding(4, filling=6)])
    assert a.dead == b.dead == frozenset()
    assert merge_votes([a, b]).dead == {v(5)}
    root = Root()
    root.record_vote(merge_votes([a, b]))
    assert root.decide() == Decision(v(4), frozenset({v(5)}))
    root.record_vote(merge_votes([a, build_vote([holding(4, 5)])]))  # an old vote that comes late
    assert root.decide() == Decision(v(4), frozenset({v(5)}))
    root.record_vote(build_vote([holding(4, 6), holding(4, 6)]))
    assert root.decide() == Decision(v(6))


def test_a_late_copy_is_waited_for() -> None:
    root = Root()
    root.record_vote(build_vote([holding(4, 5), holding(4, filling=5)]))
    assert root.decide() == Decision(v(4))


def test_a_restarted_root_takes_up_where_its_page_stands() -> None:
    root = Root(sealed=v(7))
    root.record_vote(build_vote([holding(6, 7), holding(7, filling=8)]))
    assert root.decide() == Decision(v(7))  # and 6, sealed long ago, is not called abandoned


def test_nothing_is_complete_without_pairs() -> None:
    assert build_vote([]) == SILENT


def gone_past(pair: SlotPair, stamp: Stamp) -> bool:
    return (pair.high is not None and pair.high > stamp) or (pair.passed is not None and pair.passed >= stamp)


@given(st.lists(st.lists(pairs(), min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_merged_vote_says_what_all_the_pairs_say(agents: list[list[SlotPair]]) -> None:
    every = [pair for agent in agents for pair in agent]
    votes = [build_vote(agent) for agent in agents]
    merged = merge_votes(votes)
    seen = frozenset().union(*(pair.list_complete_stamps() for pair in every))
    assert merged.complete == frozenset(
        stamp for stamp in seen if all(stamp in p.list_complete_stamps() for p in every)
    )
    dead = {s for s in seen if any(p.find_slot(s) is None and gone_past(p, s) for p in every)}
    assert merged.dead == dead
    assert merge_votes([merge_votes(votes[:1]), merge_votes([*votes[1:], votes[0]])]) == merged
    assert merge_votes(reversed(votes)) == merged
    assert len(merged.kept) <= 3


@given(st.lists(pairs(), min_size=1, max_size=12), st.integers(1, 4))
def test_the_tree_gives_what_all_the_pairs_say(agents: list[SlotPair], fanout: int) -> None:
    n = len(agents)
    up: dict[int, Vote] = {}
    for position in reversed(range(n)):
        up[position] = merge_votes(
            [build_vote([agents[position]]), *(up[child] for child in list_children(position, n, fanout))]
        )
    assert up[0] == build_vote(agents)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(pairs(), min_size=1, max_size=2)), max_size=12))
def test_decisions_stand(votes: list[tuple[int, list[SlotPair]]]) -> None:
    root, latest = Root(), dict.fromkeys(range(3), SILENT)
    sealed: list[Stamp] = []
    abandoned: set[Stamp] = set()
    for member, held in votes:
        latest[member] = build_vote(held)
        root.record_vote(merge_votes(latest.values()))
        word = root.decide()
        if word.sealed is not None:
            sealed.append(word.sealed)
        abandoned |= word.abandoned
        assert sealed == sorted(sealed)
        assert not abandoned & set(sealed)


@given(st.lists(st.lists(pairs(), min_size=1, max_size=2), min_size=3, max_size=3))
def test_the_order_of_votes_does_not_matter(held: list[list[SlotPair]]) -> None:
    words = set()
    for order in permutations(range(3)):
        root, latest = Root(), dict.fromkeys(range(3), SILENT)
        for member in (*order, *order):
            latest[member] = build_vote(held[member])
            root.record_vote(merge_votes(latest.values()))
        words.add((root.decide().sealed, root.decide().abandoned))
    assert len(words) == 1


@given(st.integers(1, 400), st.integers(1, 17))
def test_the_tree_reaches_everybody_once(n: int, fanout: int) -> None:
    below = [child for position in range(n) for child in list_children(position, n, fanout)]
    assert sorted(below) == list(range(1, n))
    assert all(
        position in list_children(up, n, fanout)
        for position in range(n)
        if (up := find_parent(position, fanout)) is not None
    )
    assert find_parent(0, fanout) is None


def test_positions_outside_the_tree_are_refused() -> None:
    with pytest.raises(ValueError, match="position -1"):
        find_parent(-1)
    with pytest.raises(ValueError, match="position 3 of 3"):
        list_children(3, 3)


def test_a_vote_of_a_thousand_agents_is_as_small_as_one() -> None:
    votes = [build_vote([holding(version, version + 1)]) for version in range(1, 1001)]
    merged: Vote = merge_votes(votes)
    assert len(merged.kept) <= 2
    assert merged.complete == frozenset()
