"""What launchers and agents know of a step's attempts: joins, and the rank that is named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.attempts import NOTHING, End, Known
from gemini_hpc.core.culprits import Cause

ends = st.builds(
    End,
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([Cause.CONSEQUENCE, Cause.RAISED]),
    st.integers(0, 2),
    key=st.sampled_from(["", "k"]),
    memory=st.booleans(),
)
known = st.builds(
    Known,
    st.integers(0, 4),
    ends,
    ends,
    st.sampled_from(["", "x", "y"]),
    ends,
    st.booleans(),
    st.booleans(),
)
ONE = End("rank 1 ended", Cause.RAISED, 1)


@given(known, known, known)
def test_in_whatever_order_it_is_heard_all_know_the_same(a: Known, b: Known, c: Known) -> None:
    assert a.join(b) == b.join(a)
    assert a.join(b).join(c) == a.join(b.join(c))
    assert a.join(a) == a and a.join(b).join(b) == a.join(b)


@given(known, st.integers(0, 3), ends, known)
def test_what_is_known_only_grows(before: Known, attempt: int, end: End, other: Known) -> None:
    for after in (before.join(other), before.add_failure(attempt, end), before.add_end(attempt, end)):
        assert after.join(before) == after


def test_two_ranks_of_an_attempt_that_fail_end_it_once() -> None:
    first = Known().add_failure(0, ONE)
    assert (first.attempt, first.reason) == (1, "rank 1 ended")
    assert first.add_failure(0, End("rank 2 ended, too", Cause.RAISED, 2)) == first
    assert first.add_failure(1, ONE).attempt == 2
    other = Known().add_failure(0, End("rank 2", Cause.RAISED, 2))
    assert first.join(other).attempt == 1, "at two agents at once"
    assert first.join(other).first == ONE


def test_who_failed_first_may_be_heard_last() -> None:
    """A rank that fails of another one has told before, and the next attempt has begun."""
    victim = End("rank 0 ended", Cause.CONSEQUENCE, 0)
    begun = Known().add_failure(0, victim)
    assert begun.first == victim and begun.add_failure(0, ONE) == begun.add_end(0, ONE)
    assert begun.add_failure(0, ONE).first == ONE and begun.add_failure(0, ONE).attempt == 1
    later = begun.add_failure(1, victim).add_failure(0, ONE)
    assert (later.attempt, later.first, later.before) == (2, victim, victim), "too late to count"
    assert later.join(Known(1, ONE)).before == ONE
    over = Known(1, ONE, over="it fails at step 6 each time", last=ONE, given_up=True).join(Known(2, victim))
    assert over.first == over.ending == ONE and over.why_over == "rank 1 ended; it fails at step 6 each time"


def test_without_a_rank_that_has_succeeded_there_is_no_other_attempt() -> None:
    over = Known(2, done=True).add_failure(2, ONE)
    assert over.attempt == 2 and over.why_over == "rank 1 ended; another rank has already ended with success"
    assert over.add_failure(2, ONE) == over and not over.given_up


def test_ends_that_repeat() -> None:
    assert End(key="ValueError at t.py:3 at step 7").repeats(End(key="ValueError at t.py:3 at step 7", rank=3))
    assert not End(key="ValueError at t.py:3 at step 7").repeats(End(key="ValueError at t.py:3 at step 9"))
    assert not NOTHING.repeats(NOTHING)
