from __future__ import annotations

import time
from collections.abc import Sequence
from math import floor, inf, nan
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core.schedule import (
    Partition,
    Plan,
    compute_capacity,
    compute_transfer_s,
    divide_checkpoint,
    plan_chunks,
)

# Powers of two and multiples of 1/1024: sums and products of these are exact, so that rules can be tested as such.
exact_alpha = st.integers(0, 2048).map(lambda n: n / 1024)
exact_B = st.integers(-3, 6).map(lambda e: 2.0**e)
exact_mu = st.sampled_from([0.25, 0.5, 0.75, 1.0])
exact_T = st.lists(st.integers(0, 40 * 1024).map(lambda n: n / 1024), min_size=1, max_size=12)


@st.composite
def exact(draw: st.DrawFn) -> dict[str, Any]:
    p = draw(st.integers(1, 4))
    return {
        "T": draw(exact_T),
        "C": draw(st.integers(0, 500)),
        "m": draw(st.integers(1, 4)),
        "R": draw(st.integers(p, 200)),
        "p": p,
        "B": draw(exact_B),
        "alpha": draw(exact_alpha),
        "mu": draw(exact_mu),
    }


@st.composite
def rounded(draw: st.DrawFn) -> dict[str, Any]:
    p = draw(st.integers(1, 8))
    return {
        "T": draw(st.lists(st.floats(0, 3), min_size=1, max_size=30)),
        "C": draw(st.integers(0, 10**11)),
        "m": draw(st.integers(1, 4)),
        "R": draw(st.integers(p * 2**22, 2**30)),
        "p": p,
        "B": draw(st.floats(1e8, 1e11)),
        "alpha": draw(st.floats(0, 0.01)),
        "mu": draw(st.floats(0.1, 1)),
    }


def as_in_the_paper(
    T: Sequence[float], C: int, m: int, R: int, p: int, B: float, alpha: float, mu: float
) -> list[tuple[int, int, int]]:
    """Algorithm 2 line by line, (span, ckpt_id, size) a chunk. Changed: line 8 also ends where no byte fits, line 17
    has f(size), line 21 counts m - 1 checkpoints, sizes are whole bytes."""

    def f(s: float) -> float:
        return alpha + s / B

    if m == 1 or C == 0:
        return []
    T = [*T[:-1], inf]
    partitions = []
    ckpt_id = 0
    remain_size = C
    for span, t in enumerate(T):
        remain_span = mu * t
        while remain_span > 0:
            size = R // p if remain_span >= f(R // p) else max(0, floor((remain_span - alpha) * B))
            size = min(remain_size, size)
            if size > 0:
                remain_size = remain_size - size
                remain_span = remain_span - f(size)
                partitions.append((span, ckpt_id, size))
            else:
                break
            if remain_size == 0:
                if ckpt_id < m - 2:
                    ckpt_id = ckpt_id + 1
                    remain_size = C
                else:
                    return partitions
    raise AssertionError("the last span is infinite")


@given(exact())
def test_it_is_the_algorithm_of_the_paper(given_: dict[str, Any]) -> None:
    ours = [(part.span, part.replica, part.size) for part in divide_checkpoint(**given_)]
    assert ours == as_in_the_paper(**given_)


@given(st.one_of(exact(), rounded()))
def test_every_replica_is_sent_whole_and_in_order(given_: dict[str, Any]) -> None:
    C, m = given_["C"], given_["m"]
    partitions = divide_checkpoint(**given_)
    position = 0
    for part in partitions:
        assert (part.replica, part.offset) == divmod(position, C)
        assert 0 < part.size <= given_["R"] // given_["p"]
        position += part.size
    assert position == C * (m - 1)
    assert all(0 <= part.span < len(given_["T"]) for part in partitions)
    assert [part.span for part in partitions] == sorted(part.span for part in partitions)


@given(st.one_of(exact(), rounded()))
def test_only_the_last_span_is_overfilled(given_: dict[str, Any]) -> None:
    T, B, alpha, mu = given_["T"], given_["B"], given_["alpha"], given_["mu"]
    used = [0.0] * len(T)
    for part in divide_checkpoint(**given_):
        used[part.span] += compute_transfer_s(part.size, B, alpha)
    assert all(used_s <= mu * t * (1 + 1e-12) + 1e-12 for used_s, t in zip(used[:-1], T[:-1], strict=True))


@given(exact())
def test_a_span_has_no_room_left_while_anything_goes_to_a_later_one(given_: dict[str, Any]) -> None:
    B, alpha = given_["B"], given_["alpha"]
    made = plan_chunks(**given_)
    for span in range(made.partitions[-1].span if made.partitions else 0):
        rest = given_["mu"] * given_["T"][span] - sum(
            compute_transfer_s(part.size, B, alpha) for part in made.list_chunks(span)
        )
        assert (rest - alpha) * B < 1


def spilled(given_: dict[str, Any], **changed: Any) -> int:
    return plan_chunks(**{**given_, **changed}).spilled_bytes


@given(exact(), st.integers(1, 3), st.integers(0, 200), st.integers(0, 1024))
def test_more_of_anything_never_spills_more(given_: dict[str, Any], doubled: int, more_R: int, more_t: int) -> None:
    """Strictly so, start-up times and ends of replicas included: who is further on at the end of a span is never
    behind at the end of the next. (Fewer starts are needed to a given byte from a later one.)"""
    before = spilled(given_)
    assert spilled(given_, B=given_["B"] * 2**doubled) <= before
    assert spilled(given_, R=given_["R"] + more_R) <= before
    assert spilled(given_, alpha=given_["alpha"] / 2) <= before
    assert spilled(given_, mu=1.0) <= before
    for span in range(len(given_["T"])):
        longer = [t + more_t / 1024 * (at == span) for at, t in enumerate(given_["T"])]
        assert spilled(given_, T=longer) <= before


@given(rounded(), st.floats(1, 10), st.integers(0, 2**30))
def test_with_rounding_it_is_a_few_bytes(given_: dict[str, Any], faster: float, more_R: int) -> None:
    few = 2 * len(given_["T"])
    before = spilled(given_)
    assert spilled(given_, B=given_["B"] * faster) <= before + few
    assert spilled(given_, R=given_["R"] + more_R) <= before + few


@given(st.one_of(exact(), rounded()))
def test_a_plan_says_what_spills_and_how_late_that_is(given_: dict[str, Any]) -> None:
    T, B, alpha, mu = given_["T"], given_["B"], given_["alpha"], given_["mu"]
    made = plan_chunks(**given_)
    assert list(made.partitions) == divide_checkpoint(**given_)
    assert made.total_bytes == made.fitting_bytes + made.spilled_bytes == sum(part.size for part in made.partitions)
    last = made.list_chunks(len(T) - 1)
    assert 0 <= made.spilled_bytes <= sum(part.size for part in last)
    needed = sum(compute_transfer_s(part.size, B, alpha) for part in last)
    assert made.late_s == pytest.approx(max(0.0, needed - mu * T[-1]), abs=1e-6, rel=1e-6)
    assert made.fits == (made.spilled_bytes == 0)
    # What fits is what Algorithm 2 would place if the last span were no longer than it is, with another after it.
    longer = divide_checkpoint(**{**given_, "T": [*T, 0.0]})
    assert made.fitting_bytes == pytest.approx(sum(part.size for part in longer if part.span < len(T)), abs=2)


@given(exact())
def test_a_sender_may_send_up_to_its_span(given_: dict[str, Any]) -> None:
    made = plan_chunks(**given_)
    assert [part for span in range(made.spans) for part in made.list_chunks(span)] == list(made.partitions)
    for span in range(made.spans):
        assert all(part.span == span for part in made.list_chunks(span))
        due = made.count_due(span)
        assert all(part.span <= span for part in made.partitions[:due])
        assert all(part.span > span for part in made.partitions[due:])
    with pytest.raises(ValueError, match="outside 0"):
        made.list_chunks(made.spans)
    with pytest.raises(ValueError, match="outside 0"):
        made.count_due(-1)


@given(exact())
def test_capacity_is_what_a_span_takes(given_: dict[str, Any]) -> None:
    t = given_["T"][0]
    placed = divide_checkpoint(**{**given_, "T": [t, 0.0], "C": 10_000, "m": 2})
    sent = sum(part.size for part in placed if part.span == 0)
    assume(sent < 10_000)
    room = compute_capacity(t, *(given_[letter] for letter in ("R", "p", "B", "alpha", "mu")))
    assert sent == room


def test_an_example_by_hand() -> None:
    # Chunks of 4 bytes take 1 + 4 = 5 s. 7 s: one, then 1 byte (2 s). 1 s: nothing. The last: the rest, replica by
    # replica; 6 of its 12 s are used by the first two, 1 + 3 bytes of the third fit in what is left.
    made = plan_chunks([7, 1, 12], C=6, m=3, R=8, p=2, B=1, alpha=1, mu=1)
    assert made.partitions == (
        Partition(0, 0, 0, 4),
        Partition(0, 0, 4, 1),
        Partition(2, 0, 5, 1),
        Partition(2, 1, 0, 4),
        Partition(2, 1, 4, 2),
    )
    assert made == Plan(made.partitions, 3, 12, 0, 0.0)
    assert plan_chunks([7, 1, 8], C=6, m=3, R=8, p=2, B=1, alpha=1, mu=1) == Plan(made.partitions, 3, 12, 2, 2.0)


def test_a_last_span_without_end_takes_all() -> None:
    made = plan_chunks([0.0, inf], C=100, m=2, R=10, p=1, B=1, alpha=0, mu=0.5)
    assert (made.fits, made.late_s, len(made.list_chunks(1))) == (True, 0.0, 10)


@pytest.mark.parametrize("last_only", [True, False])
def test_a_large_checkpoint_is_planned_quickly(last_only: bool) -> None:
    T = [0.0] * 9_999 + [0.1] if last_only else [0.0009] * 10_000
    best = inf
    for _ in range(3):
        start = time.perf_counter()
        made = plan_chunks(T, C=100 * 10**9, m=2, R=128 << 20, p=4, B=12.5e9, alpha=1e-4, mu=0.9)
        best = min(best, time.perf_counter() - start)
    assert len(made.partitions) > 2_900
    assert best < 0.5


fine: dict[str, Any] = {"T": [1.0], "C": 1, "m": 2, "R": 4, "p": 2, "B": 1.0, "alpha": 0.0, "mu": 0.5}


def test_the_impossible_is_told() -> None:
    for changed, sentence in (
        ({"T": []}, "no idle spans"),
        ({"T": [-1.0, 1.0]}, "idle span 0 is -1.0 s"),
        ({"T": [inf, 1.0]}, "idle span 0 is inf s"),
        ({"T": [nan]}, "idle span 0 is nan s"),
        ({"C": -1}, "a checkpoint of -1 bytes"),
        ({"m": 0}, "0 replicas asked for"),
        ({"R": 1}, "1 bytes of buffer in 2 parts"),
        ({"p": 0}, "0 buffer parts"),
        ({"B": 0.0}, "bandwidth of 0.0"),
        ({"B": nan}, "bandwidth of nan"),
        ({"alpha": -1.0}, "start-up time of -1.0"),
        ({"mu": 0.0}, "mu is 0.0"),
        ({"mu": 1.5}, "mu is 1.5"),
    ):
        for function in (divide_checkpoint, plan_chunks):
            function(**fine)
            assert sentence in refusal(ValueError, function, **{**fine, **changed}), (function, changed)


def test_one_replica_or_nothing_to_send() -> None:
    assert divide_checkpoint(**{**fine, "m": 1}) == []
    assert divide_checkpoint(**{**fine, "C": 0}) == []
    assert plan_chunks(**{**fine, "m": 1}) == Plan((), 1, 0, 0, 0.0)
