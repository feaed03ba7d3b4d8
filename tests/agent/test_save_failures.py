"""Each reason why versions do not get to the tier is told once, and to the program when it has lasted."""

from __future__ import annotations

from gemini_hpc.agent.tier.failures import SaveFailures

FULL = "/tier/gemini-7/default/e0000001-v{:013d}: the file system is full"


def test_a_reason_is_told_once_whatever_host_and_version() -> None:
    troubles = SaveFailures()
    told = [troubles.record_failure("default", FULL.format(n), f"n{n % 3}") for n in range(10)]
    assert told == [True] + 9 * [False]
    assert troubles.describe_last("default") == f"n0: {FULL.format(9)}"
    assert troubles.record_failure("default", "/tier: the quota is used up") and troubles.record_failure(
        "other", FULL.format(9)
    )
    assert not troubles.record_failure("default", FULL.format(10)), "also where they take turns"


def test_the_program_hears_of_what_has_lasted_and_of_its_end() -> None:
    troubles = SaveFailures()
    troubles.record_failure("default", "rank 3 no longer holds version 7", "n1")
    assert troubles.pop_note("default") == ""
    troubles.record_failure("default", FULL.format(8), "n1")
    note = troubles.pop_note("default")
    assert "not saved to the tier: n1: /tier" in note and "is full" in note and troubles.pop_note("other") == ""
    troubles.record_failure("default", FULL.format(9), "n2")
    assert troubles.pop_note("default") == "", "once"
    troubles.record_success("default")
    assert (
        troubles.pop_note("default") == "versions are saved to the tier again"
        and troubles.describe_last("default") == ""
    )
    assert troubles.record_failure("default", FULL.format(10)), "anew"


def test_one_failure_between_two_saves_is_not_for_the_program() -> None:
    troubles = SaveFailures()
    for version in range(5):
        troubles.record_failure("default", f"rank 0 no longer holds version {version}")
        troubles.record_success("default")
    assert troubles.pop_note("default") == ""


def test_a_tier_that_cannot_be_seen_is_not_of_a_set() -> None:
    troubles = SaveFailures()
    assert [troubles.record_failure("", "not there") for _ in range(3)] == [True, False, False]
    assert troubles.describe_last("") == "not there" and troubles.pop_note("") == ""
