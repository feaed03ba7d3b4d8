"""Marks add up to 0 exactly where all ranks mean the same moment of a training by a version."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.copy import Copy
from gemini_hpc.core.moments import (
    MODULUS,
    UNKNOWN,
    Moment,
    MomentReport,
    add_marks,
    describe_difference,
    is_common,
    weigh_collective,
    weigh_message,
)
from gemini_hpc.core.recovery_plan import Inventory, plan_recovery
from gemini_hpc.core.slots import Slot, SlotPair, Stamp
from gemini_hpc.core.votes import Decision, Marks, Root, Vote, build_vote, merge_votes

WORLD = 8


@st.composite
def launches(draw: st.DrawFn) -> tuple[list[list[int]], list[dict[int, int]], dict[tuple[int, int], tuple[int, int]]]:
    """Groups; the collectives of each that its members have launched; messages sent and received by pair."""
    groups = draw(
        st.lists(st.lists(st.integers(0, WORLD - 1), unique=True, min_size=2), max_size=4, unique_by=frozenset)
    )
    counts = []
    for group in groups:
        count = draw(st.integers(0, 9))
        counts.append({rank: count + draw(st.sampled_from([0, 0, 0, 0, 1, -1])) for rank in group})
    pairs = st.tuples(st.integers(0, WORLD - 1), st.integers(0, WORLD - 1)).filter(lambda pair: pair[0] != pair[1])
    numbers = st.integers(0, 9).flatmap(lambda n: st.sampled_from([(n, n), (n, n), (n, n + 1), (n + 1, n)]))
    return groups, counts, draw(st.dictionaries(pairs, numbers, max_size=4))


@given(launches())
def test_marks_cancel_each_other_exactly_where_counts_are_equal(
    made: tuple[list[list[int]], list[dict[int, int]], dict[tuple[int, int], tuple[int, int]]],
) -> None:
    groups, counts, messages = made
    sums = [0] * WORLD
    for group, count in zip(groups, counts, strict=True):
        for rank in group:
            sums[rank] += count[rank] * weigh_collective(group, rank)
    for (sender, receiver), (sent, received) in messages.items():
        sums[sender] += sent * weigh_message(sender, receiver)
        sums[receiver] -= received * weigh_message(sender, receiver)
    alike = all(len(set(count.values())) == 1 for count in counts) and all(a == b for a, b in messages.values())
    assert is_common(add_marks(mark % MODULUS for mark in sums)) == alike


def test_a_group_of_one_says_nothing_and_neither_does_who_did_not_count() -> None:
    assert weigh_collective([3], 3) == weigh_collective([], 0) == weigh_collective([1, 2], 3) == 0
    assert (
        add_marks([1, UNKNOWN, 2]) == UNKNOWN and is_common(UNKNOWN) and not is_common(1) and is_common(add_marks([]))
    )


# ---- votes ---------------------------------------------------------------------------------------------


def pair(version: int, mark: int) -> SlotPair:
    return SlotPair(
        [Slot("complete", Stamp(0, version), "d", 1, moment=Moment(mark)), Slot()], high=Stamp(0, version)
    )


def votes(version: int, *marks: int) -> list[Vote]:
    """Return the votes of agents with one rank each, which keep the next one's shard as well."""
    pairs = [pair(version, mark) for mark in marks]
    return [build_vote([own, pairs[i - 1]], own=[own]) for i, own in enumerate(pairs)]


def test_a_version_that_ranks_do_not_mean_alike_is_void() -> None:
    root, seven, eight = Root(), Stamp(0, 7), Stamp(0, 8)
    root.record_vote(merge_votes(votes(7, 5, MODULUS - 4)), 2)
    assert root.decide() == Decision(None, frozenset({seven}), seven)
    root.record_difference("they differ")
    assert root.decide().why == "they differ"
    root.record_vote(merge_votes(votes(8, 5, MODULUS - 5)), 2)
    assert root.decide() == Decision(eight), "ranks that agree again are protected again"


def test_each_shard_counts_once() -> None:
    a, b, c = votes(7, 5, 6, MODULUS - 11)
    for order in ([a, b, c], [c, a, b]):
        assert merge_votes(order).marks == {Stamp(0, 7): Marks(0, 3)}
    assert merge_votes([a, b]).marks == merge_votes([b, a]).marks == {Stamp(0, 7): Marks(11, 2)}


def test_a_void_version_is_abandoned_before_its_copies_are_there() -> None:
    """Copies that are filled from other ranks' tensors cannot become complete: the tensors differ."""
    root, seven = Root(), Stamp(0, 7)
    homes = [pair(7, 5), pair(7, 6)]
    root.record_vote(build_vote([*homes, SlotPair([Slot("filling", seven), Slot()], high=seven)], own=homes), 2)
    assert root.decide() == Decision(None, frozenset({seven}), seven)


def test_agents_of_an_earlier_release_are_believed() -> None:
    a, _, _ = votes(7, 5, 6, MODULUS - 11)
    assert merge_votes([a, Vote(frozenset({Stamp(0, 7)}))]).marks is None, "an agent that does not say"


# ---- recovery ------------------------------------------------------------------------------------------


def held(version: int, *marks: int) -> list[Copy]:
    world, stamp = len(marks), Stamp(0, version)
    return [Copy("", r, world, r, 4096, 10, stamp, f"{r}@{version}", mark=mark) for r, mark in enumerate(marks)]


def test_a_version_that_ranks_do_not_mean_alike_is_not_resumed() -> None:
    """Complete everywhere, and newer than the last seal: what a failure right behind it finds."""
    noderanks = {"n0": 0, "n1": 1}
    copies = held(6, 9, MODULUS - 9) + held(7, 9, MODULUS - 8)

    def chosen(copies: list[Copy]) -> tuple[Stamp | None, tuple[str, ...]]:
        inventories = {h: Inventory(h, noderanks, 0, tuple(copies), 0, (("", Stamp(0, 6)),)) for h in noderanks}
        made = plan_recovery(inventories, list(noderanks), 2)
        return made.trainings[0].chosen, made.warnings

    stamp, warnings = chosen(copies)
    assert stamp == Stamp(0, 6) and "version 0.7" in warnings[0]
    assert chosen(held(7, 9, MODULUS - 9)) == (Stamp(0, 7), ())
    assert chosen(held(7, 9, UNKNOWN)) == (Stamp(0, 7), ())


# ---- what is said --------------------------------------------------------------------------------------


def told(*operations: int, usual: int = 3) -> str:
    return describe_difference(8, [MomentReport(rank, n, usual) for rank, n in enumerate(operations)])


def test_the_sentence_names_the_rank_and_its_calls() -> None:
    assert "rank 2 has made 1 step() call fewer (1 iteration ahead by its collectives)" in told(24, 24, 27, 24)
    assert "compared with ranks 0, 1, 3" in told(24, 24, 27, 24)
    assert "rank 0 has made 2 step() calls more (2 iterations behind" in told(18, 24, 24)
    assert "ranks 0, 1, 2, 3 and 4 others" in told(*[24] * 8, 27)
    assert "rank 1 calls step() at another place of the loop (0.7 iterations ahead" in told(24, 26, 24)
    assert "are of different moments of the training" in told(24, 24, usual=0)
