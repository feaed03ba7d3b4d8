from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.culprits import MOST_HOSTS, MOST_KEYS, SICK, Blame, Cause, Ends, Key, RankFailure, Tally

failures = st.frozensets(
    st.builds(RankFailure, st.sampled_from(Cause), st.sampled_from(["n1", "n2", "n3"]), st.integers(0, 3)),
    max_size=12,
)


def test_who_failed_first() -> None:
    for ends, first in (
        ({"n1": Cause.CRASHED}, "n1"),
        ({"n1": Cause.CONSEQUENCE, "n2": Cause.RAISED, "n3": Cause.CONSEQUENCE}, "n2"),
        ({"n1": Cause.ABORTED, "n2": Cause.CRASHED}, "n2"),  # a watchdog has ended the other one
        ({"n1": Cause.ABORTED, "n2": Cause.CONSEQUENCE}, "n1"),
        ({"n1": Cause.RAISED, "n2": Cause.HUNG}, "n2"),
        ({"n1": Cause.CONSEQUENCE}, None),  # a network that failed, a node that died
        ({"n1": Cause.RAISED, "n2": Cause.RAISED}, None),  # the program
        ({"n1": Cause.RAISED, "n2": Cause.RAISED, "n3": Cause.CRASHED}, "n3"),
        ({}, None),
    ):
        found = Ends().join(RankFailure(cause, host, rank) for rank, (host, cause) in enumerate(ends.items())).first
        assert (found.host if found is not None else None) == first, ends


def test_several_ranks_of_one_node() -> None:
    ends = Ends().join([RankFailure(Cause.CRASHED, "n1", 3), RankFailure(Cause.CRASHED, "n1", 2)])
    assert ends.first == RankFailure(Cause.CRASHED, "n1", 2)


@given(failures, failures, failures)
def test_in_whatever_order_it_is_heard_the_same_is_known(
    a: frozenset[RankFailure], b: frozenset[RankFailure], c: frozenset[RankFailure]
) -> None:
    assert Ends().join(a).join(b).join(c) == Ends().join(c).join(a).join(b) == Ends().join(a | b | c)
    assert Ends().join(a).join(a) == Ends().join(a)
    assert len(Ends().join(a | b | c).found) <= 2 * len(Cause)


@given(failures)
def test_what_is_forgotten_decides_nothing(found: frozenset[RankFailure]) -> None:
    worst = max((f.cause for f in found), default=Cause.CONSEQUENCE)
    hosts = {f.host for f in found if f.cause is worst}
    first = Ends().join(found).first
    assert (first is not None) == (worst is not Cause.CONSEQUENCE and len(hosts) == 1)


def key(attempt: int, restart: int = 0) -> Key:
    return restart, "7.0", attempt


def tally(*blames: Blame, host: str = "n1") -> Tally:
    """A tally of attempts that failed one after the other on one node."""
    found = Tally()
    for attempt, blame in enumerate(blames):
        assert found.record_blame(host, key(attempt), blame)
    return found


def test_a_node_is_sick_when_its_ranks_failed_first_twice_and_one_attempt_counts_once() -> None:
    found = tally(Blame(1, Cause.CRASHED, 10))
    assert not found.record_blame("n1", key(0), Blame(1, Cause.CRASHED, 40))
    assert found.count_failures("n1") == 1 and found.count_failures("n2") == 0 and not found.list_sick_nodes()
    assert found.record_blame("n1", key(0, restart=1), Blame(1, Cause.CRASHED, 40))
    assert found.count_failures("n1") == SICK and found.list_sick_nodes() == ["n1"], "of another incarnation"


def test_a_users_bug_speaks_against_no_node() -> None:
    for what, blames in {
        "1/0 in one rank, wherever": [Blame(3, Cause.RAISED, step) for step in (10, 20, 30)],
        "one bad sample": [Blame(3, Cause.CRASHED, step) for step in (50, 50, 51)],
        "a crash at import": [Blame(3, Cause.CRASHED, 0)] * 5,
        "a collective that one rank leaves out": [Blame(3, Cause.HUNG, 7)] * 3,
        "a device that the program asks for in vain": [Blame(3, Cause.DEVICE, 0)] * 4,
    }.items():
        assert tally(*blames).count_failures("n1") < SICK, what


def test_a_device_that_is_gone_for_good_is_counted_before_the_first_step() -> None:
    assert tally(Blame(3, Cause.DEVICE, 500), Blame(3, Cause.DEVICE, 0)).list_sick_nodes() == ["n1"]


def test_a_rank_that_takes_its_failure_along_speaks_against_no_node() -> None:
    found = tally(Blame(3, Cause.CRASHED, 10), Blame(3, Cause.CRASHED, 20), Blame(5, Cause.CRASHED, 30))
    assert found.count_failures("n1") == 3
    found.record_blame("n2", key(9), Blame(3, Cause.CRASHED, 40))
    assert found.count_failures("n1") == 1 and found.count_failures("n2") == 0


def test_a_tally_is_bounded() -> None:
    found = tally(*(Blame(0, Cause.CRASHED, 10 * (1 + at)) for at in range(2 * MOST_KEYS)))
    assert found.count_failures("n1") == MOST_KEYS
    for at in range(MOST_HOSTS):
        found.record_blame(f"m{at}", key(0), Blame(1 + at, Cause.CRASHED, 10))
    assert found.count_failures("n1") == 0 and found.count_failures(f"m{MOST_HOSTS - 1}") == 1
