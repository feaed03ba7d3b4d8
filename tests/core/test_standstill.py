"""When a training that stands still hangs, and whose fault it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.standstill import HangStanding, Judge, Place, describe_hang, shorten_stack

HANG_S = 60.0
replace = msgspec.structs.replace


def place(rank: int, version: int = 8, launched: int = 2, usual: int = 5, *, runs: bool = True) -> Place:
    return Place(version, launched, usual, rank, f"n{rank}", "allreduce_", runs)


def of(
    *places: Place, silent_s: float = 100.0, unseen_s: float = 0.0, awake_s: float = 1e6, waiting: bool = False
) -> HangStanding:
    found = [HangStanding(len(places), 1, silent_s, unseen_s, awake_s, 0.5, p, p, waiting) for p in places]
    whole = found[0]
    for other in found[1:]:
        whole = whole.join(other)
    return whole


few = st.integers(0, 3)
places = st.builds(place, few, few, few, few, runs=st.booleans())


@st.composite
def standing(draw: st.DrawFn, rank: int) -> HangStanding:
    """Of one rank."""
    there, spans = replace(draw(places), rank=rank), st.floats(0, 100)
    return HangStanding(4, 1, draw(spans), draw(spans), draw(spans), 0.5, there, there, draw(st.booleans()))


@given(standing(0), standing(1), standing(2))
def test_in_whatever_order_ranks_are_put_together(a: HangStanding, b: HangStanding, c: HangStanding) -> None:
    assert a.join(b) == b.join(a)
    assert a.join(b).join(c) == a.join(b.join(c))


@given(st.lists(places, min_size=2, max_size=6), st.booleans())
def test_who_is_named_is_behind_everybody(ranks: list[Place], waiting: bool) -> None:
    whole = of(*ranks, waiting=waiting)
    assert all(whole.least.reached <= p.reached <= whole.most.reached for p in ranks)
    assert Judge(HANG_S).is_hung(whole) == (waiting or len({p.reached for p in ranks}) > 1)
    assert describe_hang(whole).startswith(f"rank {whole.least.rank}: ")


def test_the_rank_that_has_launched_the_fewest_collectives_hangs() -> None:
    whole = of(place(0, launched=3), place(1, launched=2), place(2, launched=3))
    assert Judge(HANG_S).is_hung(whole) and whole.least.rank == 1
    assert describe_hang(whole) == (
        "rank 1: no progress for 100 s, usually 0.5 s a step; it has launched 2 collectives of step 9, "
        "others 3, which wait in allreduce_"
    )


def test_of_ranks_in_the_same_collective_the_one_that_does_not_run() -> None:
    whole = of(place(0), place(1), place(2, runs=False), waiting=True)
    assert Judge(HANG_S).is_hung(whole) and whole.least.rank == 2
    assert describe_hang(whole).endswith("all ranks are in allreduce_, number 2 of step 9, and rank 2 does not run")
    assert describe_hang(of(place(0), place(1), waiting=True)).endswith("number 2 of step 9"), (
        "the network, or a bug of all"
    )


def test_stages_of_a_pipeline_are_compared_by_their_own_iterations() -> None:
    assert of(place(0, launched=6, usual=8), place(1, launched=4, usual=5)).least.rank == 0
    assert of(place(0, launched=9, usual=8), place(1, launched=5, usual=5)).held_s == 0.0


@given(st.floats(0, 1e6), st.integers(0, 9))
def test_ranks_that_are_all_between_two_steps_do_not_hang(silent_s: float, launched: int) -> None:
    """They evaluate, load data or compile."""
    whole = of(*(place(rank, launched=launched) for rank in range(3)), silent_s=silent_s)
    assert not Judge(HANG_S).is_hung(whole)


def test_a_job_that_is_suspended_has_time() -> None:
    judge = Judge(HANG_S)
    behind = place(0, launched=1), place(1)
    assert not judge.is_hung(of(*behind, silent_s=65.0, unseen_s=10.0)), "nobody knows whether a rank runs"
    assert not judge.is_hung(of(*behind, silent_s=5000.0, unseen_s=4000.0, awake_s=0.0)), "no rank anywhere runs"
    assert not judge.is_hung(of(*behind, silent_s=5030.0, awake_s=30.0)), "it has just been resumed"
    assert judge.is_hung(of(*behind, silent_s=5115.0, awake_s=115.0)), (
        "as after any wait of 55 s that ended by itself"
    )


def test_no_judgement_without_all_ranks() -> None:
    whole = of(place(0, launched=1), place(1))
    assert not Judge(HANG_S).is_hung(replace(whole, world=3)) and not Judge(HANG_S).is_hung(None)


def test_patience_follows_the_iteration() -> None:
    whole = replace(of(place(0, launched=1), place(1)), usual_s=20.0)
    assert not Judge(HANG_S).is_hung(whole) and Judge(HANG_S).is_hung(replace(whole, silent_s=201.0))


@dataclass
class Watched:
    """One rank keeps the others waiting, now and then."""

    judge: Judge = field(default_factory=lambda: Judge(HANG_S))

    def wait(self, seconds: float) -> float | None:
        """When a hang is called; None: it ended before."""
        for at in range(1, round(seconds) + 1):
            if self.judge.is_hung(of(place(0, launched=1), place(1), silent_s=float(at))):
                return at
        self.judge.is_hung(of(place(0, launched=1), place(1), silent_s=0.0))
        return None


def test_a_wait_that_has_ended_by_itself_before_may_come_again_and_take_longer() -> None:
    watched = Watched()
    assert watched.wait(55) is None and watched.wait(105) is None
    assert watched.wait(300) == 211, "twice the longest"


def test_before_the_second_step_patience_is_longer_and_measures_nothing() -> None:
    def early(silent_s: float) -> HangStanding:
        return replace(of(place(0, 0, 2, 0), place(1, 0, 3, 0), silent_s=silent_s), usual_s=0.0, early=True)

    judge = Judge(HANG_S)
    assert early(100.0).least.rank == 0, "of numbers alone"
    assert not judge.is_hung(early(4 * HANG_S)) and judge.is_hung(early(4 * HANG_S + 1))
    assert describe_hang(early(300.0)).startswith(
        "rank 0: no progress for 300 s, before the second step; it has launched 2 "
    )
    judge = Judge(HANG_S)
    assert not judge.is_hung(early(200.0)) and not judge.is_hung(of(place(0), place(1)))
    assert judge.is_hung(of(place(0, launched=1), place(1), silent_s=HANG_S + 1))


def test_each_hang_makes_the_job_more_patient_for_a_while() -> None:
    watched = Watched()
    found = []
    for _ in range(4):
        found.append(watched.wait(300))
        watched.judge.begin_launch()
    assert found == [61, 121, 241, 241]
    again = [watched.judge.is_hung(of(place(0, launched=1), place(1), silent_s=at)) for at in (241.0, 242.0, 243.0)]
    assert again == [True] * 3, "one hang is called for as long as it lasts"


def test_a_stack_in_a_line() -> None:
    stack = """Current thread 0x00007f (most recent call first):
  File "/home/u/my in files/data.py", line 41 in read
  File "/home/u/train.py", line 7 in <module>
"""
    assert shorten_stack(stack, 200) == "read (data.py:41) < <module> (train.py:7)"
    assert shorten_stack(stack, 30) == "read (data.py:41) < ..."
    assert shorten_stack(stack, 6) == "read (" and shorten_stack("rubbish", 9) == ""
