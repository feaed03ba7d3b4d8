"""The sentence for ranks that meet in different calls."""

from __future__ import annotations

from gemini_hpc.mpi.calls import Call, describe_difference


def test_ranks_that_agree() -> None:
    assert not describe_difference([Call("step()", 7)] * 3)
    assert not describe_difference([Call("step()", 7), Call("step()", 7, ready=False, lost="no memory")])


def test_ranks_that_differ() -> None:
    calls = [Call("step()", 7), Call("close()", 6), Call("step()", 7), Call("step()", 1), Call("archive()")]
    assert describe_difference(calls) == (
        "ranks 0, 2 are in step(), with 7 step() calls made; rank 1 is in close(), with 6 step() calls made; "
        "rank 3 is in step(), with 1 step() call made; rank 4 is in archive()"
    )
