"""The contract of a transport (transport/base.py), over every transport of the registry, between real processes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import until

from gemini_hpc.train.transport import gloo
from gemini_hpc.train.transport.base import Head
from gemini_hpc.train.transport.gloo import GlooTransport

from .transport_teams import KINDS, STARTS, Kind, Mpi, Team, Teams, lacking

pytestmark = pytest.mark.slow

STARTED = sorted({kind.start for kind in KINDS})
MPIS = [name for name in STARTED if isinstance(STARTS[name].members, Mpi)]


@pytest.fixture(scope="module")
def teams(request: pytest.FixtureRequest) -> Iterator[Teams]:
    """All that the chosen tests need, started beforehand."""
    made = Teams()
    tests = [item for item in request.session.items if item.path == request.path and "teams" in item.fixturenames]
    parameters = [item.callspec.params for item in tests]
    wanted = {p["kind"].start if "kind" in p else p["start"] for p in parameters}
    try:
        made.prepare(sorted(start for start in wanted if not lacking(start)))
        yield made
    finally:
        made.close()


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    need(request.param.start)
    return request.param


def need(start: str) -> None:
    if what := lacking(start):
        pytest.fail(what, pytrace=False)


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
def test_bytes_arrive_in_any_sizes_and_chunks(teams: Teams, kind: Kind, plan: list[dict[str, object]]) -> None:
    teams.run(kind, "versions", plan=plan)


def test_nothing_and_very_many_chunks(teams: Teams, kind: Kind) -> None:
    sizes = [[], [1] * 600, [0], [65_536] * 40]
    plan = [{"seed": n, "sizes": s, "accept": True, "ahead": 5} for n, s in enumerate(sizes)]
    teams.run(kind, "versions", plan=plan)


@pytest.mark.parametrize("size", [1, 60_000])
def test_a_wait_returns_when_the_other_end_has_the_chunk(teams: Teams, kind: Kind, size: int) -> None:
    waited, (began,), _ = teams.run(kind, "acknowledged", size=size)
    assert waited == sorted(waited) and waited[0] >= began


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("start", STARTED)
def test_slow_copies_hold_the_network_only_when_all_parts_are_full(teams: Teams, start: str, p: int) -> None:
    need(start)
    _, used, _ = teams.run(Kind(start, p), "slow_copies", chunks=20, part_bytes=4096)
    assert used == p


@pytest.mark.parametrize("p", [1, 4])
@pytest.mark.parametrize("start", STARTED)
def test_a_copy_that_fails_breaks_the_link_at_both_ends_and_takes_no_part_away(
    teams: Teams, start: str, p: int
) -> None:
    need(start)
    reason, _, _ = teams.run(Kind(start, p), "failed_copy", p=p)
    assert "the other end has given up" in reason


@pytest.mark.parametrize(("p", "inboxes"), [(0, 1), (2, 2), (5, 2), (4, 1)])
@pytest.mark.parametrize("start", STARTED)
def test_two_send_to_one(teams: Teams, start: str, p: int, inboxes: int) -> None:
    """With fewer inboxes foreseen than there are, one waits for the other's parts."""
    need(start)
    teams.run(Kind(start, p), "two_into_one", count=6, inboxes=inboxes, part_bytes=1000)


def test_three_in_a_ring(teams: Teams, kind: Kind) -> None:
    teams.run(kind, "ring", count=8)


@pytest.mark.parametrize("start", STARTED)
@pytest.mark.parametrize(
    ("head", "words"),
    [
        (None, "no head of a version"),
        ([1, 10, 5, [10]], "no head of a version"),
        ([1, 10, 10, [5]], "announced 10 bytes in chunks of 5"),
    ],
)
def test_garbage_in_place_of_a_head_breaks_the_link_at_both_ends(
    teams: Teams, start: str, head: list[object] | None, words: str
) -> None:
    need(start)
    sender, receiver, _ = teams.run(Kind(start), "hostile", head=head)
    assert words in receiver
    assert "the other end has given up" in sender


@pytest.mark.parametrize("start", ["gloo"])
def test_a_chunk_larger_than_the_parts_breaks_the_link_at_both_ends(teams: Teams, start: str) -> None:
    sender, receiver, _ = teams.run(Kind(start, 4), "hostile", head=[1, 2000, 2000, [2000]], part_bytes=1000)
    assert "does not go into a part of 1000" in receiver
    assert "the other end has given up" in sender


@pytest.mark.parametrize("start", STARTED)
def test_a_chunk_that_was_not_announced_is_not_sent(teams: Teams, start: str) -> None:
    need(start)
    teams.run(Kind(start), "wrong_chunk")


@pytest.mark.parametrize(("p", "waiting"), [(0, "next"), (0, "offer"), (0, "chunk"), (0, "receive"), (4, "receive")])
@pytest.mark.parametrize("start", STARTED)
def test_interrupt_ends_every_wait(teams: Teams, start: str, p: int, waiting: str) -> None:
    need(start)
    teams.run(Kind(start, p), "interrupted", waiting=waiting)


@pytest.mark.parametrize("start", MPIS)
def test_mpi_that_does_not_fit_is_refused_on_all_ranks(teams: Teams, start: str) -> None:
    need(start)
    said = teams.run(Kind(start), "mpi_refusals")
    assert said[0] == said[1] == said[2]
    alone, threads, missing, early, mixed = said[0]
    assert "torch.distributed has 3 ranks, MPI's communicator 1:" in alone
    assert "rank 1: MPI was initialised without MPI_THREAD_MULTIPLE" in threads
    assert "rank 1: no MPI for Python" in missing and "pip install 'mpi4py>=4'" in missing
    assert "rank 1: MPI is not initialised: `from mpi4py import MPI` before" in early
    assert "several MPI jobs" in mixed


# ---- the end of processes ------------------------------------------------------------------------------


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


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
        monkeypatch.setattr(gloo, "own_group", lambda within, timeout, made=made: made(next(groups)))
        transport = GlooTransport()
        box = transport.outbox(1 - rank)
        assert box.offer(Head(1, 50_000, 50_000, (50_000,)))
        box.send(torch.zeros(50_000, dtype=torch.uint8))
        transport.inbox(1 - rank).answer(True)
    small = {key: max(sizes) < 1000 for key, sizes in sent.items()}
    assert sorted(small) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(small[group, 0] != small[group, 1] for group in (0, 1)), sent


@pytest.mark.parametrize("start", STARTED)
def test_a_process_ends_well_after_its_blocked_receive_was_interrupted(start: str) -> None:
    """gloo aborts a process that ends while a thread is blocked in a receive; a thread of Python's that has to be
    left behind must not be one of these."""
    need(start)
    team = Team(start, 1 if STARTS[start].ends_together else 2)
    try:
        team.run("leaves")
        assert set(team.hang_up()) == {0}, team.members.words()
    finally:
        team.close()


@pytest.mark.parametrize("start", [name for name in STARTED if not STARTS[name].ends_together])
def test_a_killed_process_breaks_its_links(start: str) -> None:
    killed = {waiting: Team(start, 2) for waiting in ("next", "offer", "chunk", "receive")}
    try:
        for waiting, team in killed.items():
            team.tell("killed", waiting=waiting)
        for team in killed.values():
            (took,) = team.hear([0])
            assert took < 10
    finally:
        for team in killed.values():
            team.close()


@pytest.mark.parametrize("start", [name for name in STARTED if STARTS[name].ends_together])
def test_an_mpi_job_ends_with_the_first_of_its_processes(teams: Teams, start: str) -> None:
    """So there is nothing that could go on unprotected. It must be the whole job, and soon: the agents see it end."""
    need(start)
    team = teams.take(start)
    try:
        began = time.monotonic()
        team.tell("killed", waiting="next")
        (code,) = team.members.codes(20.0)
        assert code not in (0, None), team.members.words()
        until(lambda: all(map(gone, team.pids)), 10.0)
        assert time.monotonic() - began < 60
    finally:
        team.close()
