"""Who writes what to the tier when a node is missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core import placement
from gemini_hpc.core.salvage import assign_writers


def test_who_is_there_writes_its_own_and_a_holder_the_rest() -> None:
    held = {"a": {0: {0, 1}, 1: {2, 3}}, "c": {2: {4, 5}, 1: {2, 3}}}
    noderanks = {"a": 0, "b": 1, "c": 2}
    chosen, missing = assign_writers(held, noderanks, 6)
    assert chosen == {"a": {0, 1}, "c": {2}} and not missing


def test_a_home_has_one_writer_who_has_all_of_it() -> None:
    """It has not got all of them back yet; the other holder has."""
    chosen, missing = assign_writers({"a": {0: {0}}, "b": {0: {0, 1}, 1: {2}}}, {"a": 0, "b": 1}, 3)
    assert chosen == {"b": {0, 1}} and not missing


def test_what_nobody_has_is_told() -> None:
    assert assign_writers({"a": {0: {0}}, "b": {}}, {"a": 0, "b": 1}, 3) == ({"a": {0}}, [1, 2])
    assert assign_writers({"a": {0: {0}}, "b": {0: {1}}}, {"a": 0, "b": 1}, 2) == ({}, [0, 1])


@given(st.data())
def test_whatever_is_survivable_is_written_once(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    m = data.draw(st.integers(1, n))
    per_node = data.draw(st.integers(1, 3))
    gone = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    homes = {home: set(range(home * per_node, (home + 1) * per_node)) for home in range(n)}
    held = {
        f"h{node}": {home: homes[home] for home in placement.list_homes(node, n, m)} for node in set(range(n)) - gone
    }
    chosen, missing = assign_writers(held, {f"h{node}": node for node in range(n)}, n * per_node)
    lost = {home for home in range(n) if gone.issuperset(placement.list_holders(home, n, m))}
    assert missing == sorted(rank for home in lost for rank in homes[home])
    assert not missing or not placement.can_survive(n, m, gone)
    written = [home for found in chosen.values() for home in found]
    assert sorted(written) == sorted(set(range(n)) - lost)
    for host, found in chosen.items():
        assert found <= held[host].keys() and (int(host[1:]) in found or int(host[1:]) in lost)
