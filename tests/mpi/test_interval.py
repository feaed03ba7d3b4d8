"""The choice of the versions that an MPI program saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc import clock
from gemini_hpc.core.seal_latency import VersionTimes
from gemini_hpc.core.wait_budget import FIRST_S
from gemini_hpc.mpi.interval import SaveInterval

SECONDS = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))
# of each rank at one step(): the iteration, the version's cost, the time to its seal, the meeting
COSTS = st.tuples(SECONDS, SECONDS, SECONDS, SECONDS)


class Hand:
    """A clock that is set by hand, for one rank at a time."""

    now_s = 0.0

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing waits here")


@pytest.fixture(scope="module", autouse=True)
def hand() -> Iterator[Hand]:
    found = Hand()
    clock.use(found)
    yield found
    clock.use(None)


class Ranks:
    """The choices of all ranks, and what they say."""

    def __init__(self, hand: Hand, world: int, every: int = 0, overhead: float = 0.01) -> None:
        self.said: list[str] = []
        self.seal = (0, 0), 0.0
        self.all = [SaveInterval(every, overhead, rank, self.said.append, lambda: self.seal) for rank in range(world)]
        self.hand, self.version = hand, 0
        self.saved: list[int] = []

    def step(self, costs: list[tuple[float, float, float, float]]) -> None:
        self.version += 1
        for rank, cost in zip(self.all, costs, strict=True):
            self.hand.now_s += cost[0]
            rank.enter_step()
            self.hand.now_s -= cost[0]
        saves = {rank.saves(self.version) for rank in self.all}
        assert len(saves) == 1, "some ranks would wait for the others for ever"
        if True in saves:
            self.saved.append(self.version)
            needs = [rank.compute_need() for rank in self.all]
            for rank, (_, own_s, sealed_s, met_s) in zip(self.all, costs, strict=True):
                rank.record_meeting(met_s)
                rank.adopt_needs(needs, self.version)
                rank.record_loss(own_s)
                rank.record_cost(own_s)
                if sealed_s:
                    rank.latency.begin_version(VersionTimes(self.version, taken_at=0.0))
                    self.seal = (1, self.version), sealed_s
                    rank.latency.poll()
        for rank in self.all:
            rank.leave_step()


@given(
    st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(COSTS, min_size=n, max_size=n), min_size=1, max_size=40))
)
def test_all_ranks_save_the_same_versions_whatever_each_of_them_measures(
    costs: list[list[tuple[float, float, float, float]]],
) -> None:
    ranks = Ranks(Hand(), len(costs[0]))
    clock.use(ranks.hand)
    for step in costs:
        ranks.step(step)
        assert len({rank.j for rank in ranks.all}) == 1


@pytest.mark.parametrize(
    ("cost", "j", "why"),
    [
        ((0.1, 0.01, 0.05, 0.0), 10, "step() takes 0.01 s to capture the state"),
        ((0.1, 0.0, 0.95, 0.0), 10, "a version is sealed 0.95 s after step() (copy, digests, votes)"),
        ((0.1, 0.0, 0.0, 0.005), 5, "step() takes 0.005 s to capture the state"),  # the meeting itself
    ],
)
def test_the_rank_that_needs_most_decides_and_says_so(
    hand: Hand, cost: tuple[float, float, float, float], j: int, why: str
) -> None:
    clock.use(hand)
    ranks = Ranks(hand, 3)
    light = (0.1, 0.0, 0.01, cost[3] + 0.02)  # early in the meeting
    for _ in range(100):
        ranks.step([light, light, cost])
    assert ranks.all[0].j == j
    assert [v for v in ranks.saved if v < 5] == [1, 2, 3, 4]
    assert {after - before for before, after in zip(ranks.saved[5:], ranks.saved[6:], strict=False)} == {j}
    (line,) = ranks.said
    assert line.endswith(
        f"{why} in iterations of 0.1 s: saving one version in {j}; a failure repeats at most {2 * j} steps"
    )
    states = [rank.build_state(sends=True) for rank in ranks.all]
    assert {(s.j, s.repeated, s.stage, s.transport) for s in states} == {(j, 2 * j, "steady", "mpi")}
    (number,) = [number for number, state in enumerate(states) if state.reason]
    assert line.startswith(f"rank {number}: ") and states[number].reason.startswith(
        f"{why} in iterations of 0.1 s; what helps: "
    )


@given(SECONDS, SECONDS, SECONDS)
def test_within_twenty_versions_nothing_costs_more_than_the_ceiling(
    usual_s: float, own_s: float, sealed_s: float
) -> None:
    usual_s = max(1e-3, usual_s)
    ranks = Ranks(Hand(), 1)
    clock.use(ranks.hand)
    while len(ranks.saved) < 20 and ranks.version < 1000:
        ranks.step([(usual_s, own_s, sealed_s, 0.0)])
    (rank,) = ranks.all
    lost_s = own_s + max(0.0, sealed_s - rank.j * usual_s)
    assert rank.j == 10_000 or lost_s <= 1.26 * 0.01 * rank.j * usual_s


@pytest.mark.parametrize(("beside", "helps"), [(True, "fewer bytes a rank"), (False, "MPI_THREAD_MULTIPLE")])
def test_what_helps(hand: Hand, beside: bool, helps: str) -> None:
    clock.use(hand)
    ranks = Ranks(hand, 1)
    ranks.all[0].beside = beside
    assert ranks.all[0].build_state(sends=True).stage == "profile"
    for _ in range(20):
        ranks.step([(0.1, 0.05, 0.0, 0.0)])
    assert f"what helps: {helps}" in ranks.all[0].build_state(sends=True).reason


def test_a_chosen_interval_stays(hand: Hand) -> None:
    clock.use(hand)
    ranks = Ranks(hand, 2, every=3)
    for _ in range(30):
        ranks.step([(0.001, 1.0, 1.0, 1.0)] * 2)
    assert ranks.saved == list(range(3, 31, 3)) and not ranks.said
    state = ranks.all[0].build_state(sends=False)
    assert (state.j, state.reason, state.stage, state.transport) == (3, "", "steady", "none")
    assert ranks.all[0].patience_s is None


def test_waits_are_bounded(hand: Hand) -> None:
    """The first versions may wait for 5 s in all, which is told; later ones for the ceiling's share of the time."""
    clock.use(hand)
    ranks = Ranks(hand, 1)
    (rank,) = ranks.all
    assert rank.patience_s == FIRST_S <= 5.0
    for _ in range(4):
        ranks.step([(0.1, 1.5, 1.5, 0.0)])
    assert ranks.said[0].startswith("rank 0: the program has waited 4.5 s for its first versions; from now on")
    assert rank.patience_s == 0.0
    for _ in range(2000):
        ranks.step([(0.1, 0.0, 0.0, 0.0)])
    assert 0.0 < rank.patience_s <= 1.5
