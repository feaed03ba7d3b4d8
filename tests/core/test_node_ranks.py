from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.node_ranks import assign_ranks, hash_noderanks

hosts = st.lists(st.integers(0, 30).map("n{}".format), unique=True, max_size=12)


def test_a_replacement_takes_the_dead_nodes_rank() -> None:
    first = assign_ranks(None, ["n1", "n2", "n3"])
    assert first == {"n1": 0, "n2": 1, "n3": 2}
    second = assign_ranks(first, ["n0", "n2", "n3"])  # the replacement sorts first, and here that is also its rank
    assert second == {"n2": 1, "n3": 2, "n0": 0}
    assert assign_ranks(second, ["n0", "n1", "n3"]) == {"n0": 0, "n1": 1, "n3": 2}


@given(hosts, hosts)
def test_survivors_stay_and_the_others_fill_the_gaps_in_order(before: list[str], after: list[str]) -> None:
    previous = assign_ranks(None, before)
    ranks = assign_ranks(previous, after)
    assert sorted(ranks.values()) == list(range(len(after)))
    kept = {host for host in after if previous.get(host, len(after)) < len(after)}
    assert all(ranks[host] == previous[host] for host in kept)
    new = [ranks[host] for host in after if host not in kept]
    assert new == sorted(new)


@given(hosts, hosts, hosts)
def test_any_survivor_gives_the_same_map(first: list[str], second: list[str], third: list[str]) -> None:
    once = assign_ranks(assign_ranks(None, first), second)
    assert assign_ranks(once, second) == once
    assert assign_ranks(dict(reversed(once.items())), third) == assign_ranks(once, third)


@given(st.dictionaries(st.integers(0, 9).map("n{}".format), st.integers(-3, 12)), hosts)
def test_a_map_that_makes_no_sense_still_gives_each_rank_once(previous: dict[str, int], after: list[str]) -> None:
    assert sorted(assign_ranks(previous, after).values()) == list(range(len(after)))


def test_a_host_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="n1 is in the host list twice"):
        assign_ranks({"n1": 0}, ["n1", "n2", "n1"])


def test_the_hash_is_over_content_only() -> None:
    one = hash_noderanks({"a": 0, "b": 1}, 7, 2)
    assert len(one) == 32
    assert one == hash_noderanks({"b": 1, "a": 0}, 7, 2)
    others = [
        hash_noderanks({"a": 1, "b": 0}, 7, 2),
        hash_noderanks({"a": 0, "b": 1}, 8, 2),
        hash_noderanks({"a": 0, "b": 1}, 7, 3),
    ]
    others.append(hash_noderanks({"a": 0, "b": 1}, 7, 2, (1, 0)))
    assert one not in others
