from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.culprits import MOST_HOSTS, MOST_KEYS, SICK, Cause, Ends, Failure, Tally

failures = st.frozensets(
    st.builds(Failure, st.sampled_from(Cause), st.sampled_from(["n1", "n2", "n3"]), st.integers(0, 3)), max_size=12
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
        found = Ends().join(Failure(cause, host, rank) for rank, (host, cause) in enumerate(ends.items())).first
        assert (found.host if found is not None else None) == first, ends


def test_several_ranks_of_one_node() -> None:
    ends = Ends().join([Failure(Cause.CRASHED, "n1", 3), Failure(Cause.CRASHED, "n1", 2)])
    assert ends.first == Failure(Cause.CRASHED, "n1", 2)


@given(failures, failures, failures)
def test_in_whatever_order_it_is_heard_the_same_is_known(
    a: frozenset[Failure], b: frozenset[Failure], c: frozenset[Failure]
) -> None:
    assert Ends().join(a).join(b).join(c) == Ends().join(c).join(a).join(b) == Ends().join(a | b | c)
    assert Ends().join(a).join(a) == Ends().join(a)
    assert len(Ends().join(a | b | c).found) <= 2 * len(Cause)


@given(failures)
def test_what_is_forgotten_decides_nothing(found: frozenset[Failure]) -> None:
    worst = max((f.cause for f in found), default=Cause.CONSEQUENCE)
    hosts = {f.host for f in found if f.cause is worst}
    first = Ends().join(found).first
    assert (first is not None) == (worst is not Cause.CONSEQUENCE and len(hosts) == 1)


def test_a_node_is_sick_when_its_ranks_failed_first_twice_and_one_attempt_counts_once() -> None:
    tally = Tally()
    assert tally.blame("n1", (0, "7.0", 0)) and not tally.blame("n1", (0, "7.0", 0))
    assert tally.count("n1") == 1 and tally.count("n2") == 0
    assert tally.blame("n1", (1, "7.0", 0)) and tally.count("n1") == SICK, "of another incarnation"


def test_a_tally_is_bounded() -> None:
    tally = Tally()
    for at in range(2 * MOST_KEYS):
        tally.blame("n1", (0, "7.0", at))
    assert tally.count("n1") == MOST_KEYS
    for at in range(MOST_HOSTS):
        tally.blame(f"m{at}", (0, "7.0", 0))
    assert tally.count("n1") == 0 and tally.count(f"m{MOST_HOSTS - 1}") == 1
