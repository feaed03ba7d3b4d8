from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.node_ranks import assign_ranks, count_training_nodes
from gemini_hpc.core.views import View

NAMES = tuple(f"n{i}" for i in range(1, 10))


def test_spares_make_up_for_as_many_nodes() -> None:
    view = View(("n1", "n2", "n3", "n4", "n5"), 2)
    one = view.exclude(["n3"])
    assert one is not None and one.hosts == ("n1", "n2", "n4", "n5") and one.wanted == 3
    two = one.exclude(["n5"])
    assert two is not None and two.hosts == ("n1", "n2", "n4")
    assert two.exclude(["n4"]) is None, "two nodes are fewer than train"


def test_the_job_does_not_go_on() -> None:
    for view, dead, nodes in (
        (View(("n1", "n2", "n3")), ["n2"], 0),  # no spare
        (View(("n1", "n2", "n3"), 1), [], 0),
        (View(("n1", "n2", "n3"), 1), ["n9"], 0),  # not its own
        (View(("n1", "n2", "n3"), 1, frozenset({"n2"})), ["n2"], 0),  # nothing new
        (View(("n1", "n2", "n3"), 1), ["n1"], 0),  # the batch script is gone
        (View(("n1", "n2", "n3", "n4"), 3), ["n3", "n4"], 0),  # a half could be there twice
        (View(("n1", "n2", "n3", "n4"), 2), ["n4"], 4),  # four train, whatever was asked for
    ):
        assert view.exclude(dead, nodes) is None, (view, dead)


@given(st.integers(2, 9), st.integers(0, 8), st.lists(st.sets(st.sampled_from(NAMES)), max_size=5))
def test_whoever_hears_it_all_knows_the_same_in_any_order(size: int, spares: int, said: list[set[str]]) -> None:
    view = View(NAMES[:size], min(spares, size - 1))
    whole = view.exclude(set().union(*said))
    if whole is None:
        return
    for order in (said, said[::-1], [*said, *said]):
        found = view
        for dead in order:
            found = found.exclude(dead) or found
        assert found == whole


@given(st.integers(2, 9), st.integers(1, 8), st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)))
def test_two_views_of_which_neither_holds_the_other_share_a_node(
    size: int, spares: int, a: set[str], b: set[str]
) -> None:
    view = View(NAMES[:size], min(spares, size - 1))
    one, other = view.exclude(a), view.exclude(b)
    if one is not None and other is not None:
        assert set(one.hosts) & set(other.hosts)
        assert len(one.hosts) >= view.wanted and one.hosts[0] == view.allocated[0]


def test_a_spare_has_no_rank_until_one_is_free() -> None:
    first = assign_ranks(None, ["n1", "n2", "n3", "n4"], 3)
    assert first == {"n1": 0, "n2": 1, "n3": 2}
    assert assign_ranks(first, ["n1", "n3", "n4"], 3) == {"n1": 0, "n3": 2, "n4": 1}


def test_what_gives_way_first_is_a_spare() -> None:
    assert count_training_nodes(None, 4, 3) == 3
    three = {"n1": 0, "n2": 1, "n3": 2}
    assert count_training_nodes(three, 3, 2) == 3, "of an allocation that has lost its spare"
    assert count_training_nodes(three, 2, 2) == 2 and count_training_nodes({}, 0, 0) == 1
    assert count_training_nodes({"n1": 0}, 4, 3) == 3, "a job that has grown"
