"""Who says that a node is silent: for how long that counts, and how it is taken back."""

from __future__ import annotations

from gemini_hpc.controller.witnesses import FRESH_S, Witnesses


def test_what_was_said_long_ago_does_not_count() -> None:
    heard = Witnesses()
    heard.record_witnesses(0, "n2", ["n1"], 100.0)
    heard.record_witnesses(0, "n2", ["n3"], 104.0)
    assert heard.list_fresh(0, "n2", 100.0 + FRESH_S) == {"n1", "n3"}
    assert heard.list_fresh(0, "n2", 101.0 + FRESH_S) == {"n3"}
    heard.record_witnesses(0, "n2", ["n1"], 102.0 + FRESH_S)
    assert heard.list_fresh(0, "n2", 102.0 + FRESH_S) == {"n1", "n3"}, "said again"
    assert heard.list_fresh(0, "n3", 104.0) == set()


def test_a_witness_takes_back_what_it_does_not_say_any_more() -> None:
    heard = Witnesses()
    for node in ("n2", "n4"):
        heard.record_witnesses(1, node, ["n1", "n3"], 100.0)
    heard.withdraw_reports(1, "n1", ("n4",))
    assert heard.list_fresh(1, "n2", 100.0) == {"n3"} and heard.list_fresh(1, "n4", 100.0) == {"n1", "n3"}
    heard.withdraw_reports(0, "n3", ())
    assert heard.list_fresh(1, "n2", 100.0) == {"n3"}, "that was about another incarnation"


def test_of_a_survivor_later_incarnations_are_asked_too() -> None:
    heard = Witnesses()
    heard.record_witnesses(1, "n2", ["n1"], 100.0)
    heard.record_witnesses(0, "n2", ["n3"], 100.0)
    assert heard.list_fresh(0, "n2", 100.0) == {"n3"}
    assert heard.list_fresh(0, "n2", 100.0, counts_later=True) == {"n1", "n3"}
    assert heard.list_fresh(1, "n2", 100.0, counts_later=True) == {"n1"}, "never an earlier one"
