"""The links over gloo that the NCCL transport has beside it (train/nccl/gloo_links.py), between real processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemini_hpc.train.nccl import gloo_links
from gemini_hpc.train.nccl.gloo_links import GlooLinks
from gemini_hpc.train.transport.base import Head

from .links_team import Team

pytestmark = pytest.mark.slow

Runs = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    """A scenario on three ranks, which serve many tests. A team that failed is not used again."""
    team = Team(3)
    team.connect()

    def scenario(name: str, **arguments: Any) -> list[Any]:
        nonlocal team
        try:
            return team.run(name, **arguments)
        except AssertionError:
            team.close()
            team = Team(3)
            raise

    yield scenario
    team.close()


VERSION = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1 << 30),
        "sizes": st.one_of(
            st.lists(st.integers(1, 50_000), max_size=6),
            st.lists(st.just(1), max_size=40),
            st.lists(st.sampled_from([0, 1, 4096, 65_536]), max_size=12),
        ),
        "accept": st.sampled_from([True, True, False]),
        "ahead": st.integers(1, 6),
    }
)


@settings(
    max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=st.lists(VERSION, min_size=2, max_size=6))
def test_bytes_arrive_in_any_sizes_and_chunks(run: Runs, plan: list[dict[str, object]]) -> None:
    run("versions", plan=plan)


def test_nothing_and_very_many_chunks(run: Runs) -> None:
    sizes = [[], [1] * 600, [0], [65_536] * 40]
    plan = [{"seed": n, "sizes": s, "accept": True, "ahead": 5} for n, s in enumerate(sizes)]
    run("versions", plan=plan)


@pytest.mark.parametrize("size", [1, 60_000])
def test_a_wait_returns_when_the_other_end_has_the_chunk(run: Runs, size: int) -> None:
    waited, (began,), _ = run("acknowledged", size=size)
    assert waited == sorted(waited) and waited[0] >= began


def test_two_send_to_one(run: Runs) -> None:
    run("two_into_one", count=6)


def test_three_in_a_ring(run: Runs) -> None:
    run("ring", count=8)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (None, "no head of a version"),
        ([1, 10, 5, [10]], "no head of a version"),
        ([1, 10, 10, [5]], "announced 10 bytes in chunks of 5"),
    ],
)
def test_garbage_in_place_of_a_head_breaks_the_link_at_both_ends(
    run: Runs, head: list[object] | None, words: str
) -> None:
    sender, receiver, _ = run("hostile", head=head)
    assert words in receiver
    assert "the other rank has ended the transfer" in sender


def test_a_chunk_that_was_not_announced_is_not_sent(run: Runs) -> None:
    run("wrong_chunk")


@pytest.mark.parametrize("waiting", ["next", "offer", "chunk", "receive"])
def test_interrupt_ends_every_wait(run: Runs, waiting: str) -> None:
    run("interrupted", waiting=waiting)


# ---- the end of processes ------------------------------------------------------------------------------


def test_over_gloo_only_small_messages_go_against_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent over one of its connections waits for all that was sent before. So in each of them chunks may go
    in one direction only."""
    sent: dict[tuple[int, int], set[int]] = {}  # (group, sender) -> bytes of messages

    class Backend:
        def __init__(self, group: int, rank: int) -> None:
            self._group, self._rank = group, rank

        def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> object:
            sent.setdefault((self._group, self._rank), set()).add(tensors[0].numel())
            return SimpleNamespace(wait=lambda: None)

        def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> object:
            tensors[0].fill_(1)  # an answer: yes
            return SimpleNamespace(wait=lambda: None)

    groups = itertools.count()
    for rank in (0, 1):
        made = lambda group, rank=rank: SimpleNamespace(  # noqa: E731
            rank=lambda: rank, _get_backend=lambda device: Backend(group % 2, rank)
        )
        monkeypatch.setattr(gloo_links, "build_own_group", lambda within, made=made: made(next(groups)))
        links = GlooLinks()
        box = links.build_outbox(1 - rank)
        assert box.offer(Head(1, 50_000, 50_000, (50_000,)))
        box.send(torch.zeros(50_000, dtype=torch.uint8))
        links.build_inbox(1 - rank).answer(True)
    small = {key: max(sizes) < 1000 for key, sizes in sent.items()}
    assert sorted(small) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(small[group, 0] != small[group, 1] for group in (0, 1)), sent


def test_a_process_ends_well_after_its_blocked_receive_was_interrupted() -> None:
    """gloo aborts a process that ends while a thread is blocked in a receive; a thread of Python's that has to be
    left behind must not be one of these."""
    team = Team(2)
    try:
        team.run("leaves")
        assert set(team.hang_up()) == {0}, team.words()
    finally:
        team.close()


def test_a_killed_process_breaks_its_links() -> None:
    killed = {waiting: Team(2) for waiting in ("next", "offer", "chunk", "receive")}
    try:
        for waiting, team in killed.items():
            team.tell("killed", waiting=waiting)
        for team in killed.values():
            (took,) = team.hear([0])
            assert took < 10
    finally:
        for team in killed.values():
            team.close()
