from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.attempts import Known

known = st.builds(
    Known, st.integers(0, 3), st.sampled_from(["", "a", "b"]), st.sampled_from(["", "x", "y"]), st.booleans()
)


@given(known, known, known)
def test_in_whatever_order_it_is_heard_all_know_the_same(a: Known, b: Known, c: Known) -> None:
    assert a.join(b) == b.join(a)
    assert a.join(b).join(c) == a.join(b.join(c))
    assert a.join(a) == a and a.join(b).join(b) == a.join(b)


@given(known, st.integers(0, 3), known)
def test_what_is_known_only_grows(before: Known, attempt: int, other: Known) -> None:
    for after in (before.join(other), before.failed(attempt, "rank 1 ended")):
        assert after.join(before) == after


def test_two_ranks_of_an_attempt_that_fail_end_it_once() -> None:
    first = Known().failed(0, "rank 1 ended")
    assert (first.attempt, first.reason) == (1, "rank 1 ended")
    assert first.failed(0, "rank 0 ended, too") == first
    assert first.failed(1, "rank 1 ended").attempt == 2
    assert Known().failed(0, "rank 1").join(Known().failed(0, "rank 2")).attempt == 1, "at two agents at once"


def test_without_a_rank_that_has_succeeded_there_is_no_other_attempt() -> None:
    over = Known(2, done=True).failed(2, "rank 1 ended")
    assert over.attempt == 2 and over.over == "rank 1 ended, and another rank has already ended with success"
    assert over.failed(2, "again") == over
