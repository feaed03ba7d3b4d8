"""The exchange over NCCL, on devices that exist only in fake_device.py."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gemini_hpc.train.nccl.collective_schedule import Chunk, Place, Program
from gemini_hpc.train.nccl.exchange import Exchange, Links, Save
from gemini_hpc.train.nccl.launch_log import describe_difference, pack

from .fake_device import Deadlock, FakeEvent, World
from .fake_training import COLLECTIVES, PART, Rank, content
from .rings import build_ring


def spread(links: Links, m: int, places: list[Place], s: int) -> Program:
    """Chunks of all replicas over these places, the rest at the gate."""
    C = max(links.sizes)
    chunks: list[Chunk] = []
    for replica in range(m - 1):
        for offset in range(0, C, PART):
            chunks.append(Chunk(len(chunks), replica, offset, min(PART, C - offset)))
    at = sorted(places)[: len(chunks)]
    at += [Place(s - 1, True, 0)] * (len(chunks) - len(at))
    return Program(tuple(sorted(at)), tuple(chunks), s, C, 0.0, 0)


def train(
    world: World, ranks: list[Rank], program: Program, versions: int = 4, blocks: bool = False, every: int = 1
) -> None:
    for rank in ranks:
        rank.exchange.set_program(program)
        world.hosts[rank.rank] = rank.host(versions, blocks, every)
    world.run()
    for rank in ranks:
        rank.progress.poll_operations()


def words(ranks: list[Rank]) -> str:
    rounds = [max(numbers) for numbers in zip(*(pack(r.exchange.log.summarize()) for r in ranks), strict=True)]
    return describe_difference(rounds)


def places(s: int) -> st.SearchStrategy[list[Place]]:
    iteration = st.integers(0, s - 1)
    before = st.builds(Place, iteration, st.just(False), st.integers(0, COLLECTIVES))
    after = st.builds(Place, st.integers(0, max(0, s - 2)), st.just(True), st.just(COLLECTIVES))
    return st.lists(before | after if s > 1 else before, max_size=6)


# a smaller example of a deadlock says no more than its seed does, and takes minutes to find
QUICK = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
seeds = st.integers(0, 1 << 30)
eager = st.sampled_from((0.02, 0.5, 0.98))


@QUICK
@given(
    data=st.data(),
    shape=st.sampled_from(((2, 2), (3, 2), (3, 3), (4, 2), (4, 3))),
    s=st.integers(1, 2),
    seed=seeds,
    eager_host=eager,
    blocks=st.booleans(),
    groups=st.integers(1, 2),
)
def test_all_bytes_arrive_whatever_runs_first(
    data: st.DataObject, shape: tuple[int, int], s: int, seed: int, eager_host: float, blocks: bool, groups: int
) -> None:
    """One kernel at a time fits on a device with one communicator of the training; with two, it needs two itself."""
    n, m = shape
    sizes = data.draw(st.lists(st.integers(0, 3 * PART + 3), min_size=n, max_size=n))
    links = build_ring(n, m, sizes)
    world = World(n, seed, places=groups, eager_host=eager_host)
    ranks = [Rank(world, r, links, groups) for r in range(n)]
    train(world, ranks, spread(links, m, data.draw(places(s)), s), 5, blocks, every=s)
    expected = {(v, r) for v in range(s, 6, s) for r in range(n) if sizes[r]}
    for rank in ranks:
        mine = {(v, r) for v, r in expected if rank.rank in links.targets[r]}
        assert set(rank.heard.landings) == mine
        assert rank.progress.problem == "" and not rank.progress.busy
        assert rank.progress._got == {}
        if max(sizes):
            assert rank.heard.sendings == list(range(s, 6, s))
        for version, source in mine:
            rank.check(version, source)
        for version in range(s, 5, s):  # the last one had no optimizer after it
            assert torch.equal(rank.own_slots[version], content(rank.rank, version, sizes[rank.rank]))
    assert words(ranks) == ""


# ---- the fake is no pushover: what is wrong does hang, or shows in the bytes ---------------------------


class Ahead(Exchange):
    """Enqueues at step() what belongs between later collectives."""

    def step(self, save: Save | None) -> None:
        super().step(save)
        self.finish()


class OneSided(Exchange):
    """Lets the next collective of the training run beside ours."""

    def on_launching(self) -> None:
        return


class Unordered(Exchange):
    """Does not wait for the collectives before it."""

    def on_launched(self, group: Any, work: Any) -> None:
        super().on_launched(group, self.device_mark())

    def device_mark(self) -> Any:
        return FakeEvent(lambda: 0.0, done=True)


class Late(Exchange):
    """Is one collective later than the others."""

    def on_launched(self, group: Any, work: Any) -> None:
        self._launched -= self._launched == 0 and not self._gated
        super().on_launched(group, work)


class Careless(Exchange):
    """Uses a sub-buffer again before its bytes are in the slot."""

    def _enqueue_copy(self, chunk: Chunk, message: Any, done: Any) -> Any:
        copied = super()._enqueue_copy(chunk, message, done)
        return copied and Detached(copied, done)


@dataclass
class Detached:
    """Looks like the copy's mark to whoever watches, and like the receive's to the stream that waits."""

    mark: Any
    instead: Any

    @property
    def done(self) -> bool:
        return bool(self.instead.done)

    def query(self) -> bool:
        return bool(self.mark.query())


class Torn(Exchange):
    """Lets the optimizer change what is not packed yet."""

    def prepare_for_gate(self) -> None:
        waits = self._packed
        super().prepare_for_gate()
        queue = self._device.get_current_stream().queue  # type: ignore[attr-defined]
        if waits is not None and queue and queue[-1].name == "wait":
            queue.pop()


def trial(
    seed: int,
    kinds: tuple[type[Exchange], ...],
    *,
    watched: bool = False,
    places: int = 1,
    connections: int = 8,
    chunks: int = 3,
) -> list[Rank]:
    """Two ranks, two chunks between collectives, the others at the gate."""
    links = build_ring(2, 2, [chunks * PART] * 2)
    world = World(2, seed, places=places, connections=connections, eager_host=(0.02, 0.5, 0.98)[seed % 3])
    ranks = [Rank(world, r, links, kind=kinds[r % len(kinds)]) for r in range(2)]
    looks = list(world.looks)
    if not watched:
        world.looks.clear()
    train(world, ranks, spread(links, 2, [Place(0, False, 1), Place(0, False, 2)], 1), 3)
    for look in looks:
        look()
    return ranks


def outcomes(kinds: tuple[type[Exchange], ...], tries: int = 25, **more: Any) -> dict[str, int]:
    found = {"fine": 0, "deadlock": 0, "bytes": 0}
    for seed in range(tries):
        try:
            trial(seed, kinds, **more)
            found["fine"] += 1
        except Deadlock:
            found["deadlock"] += 1
        except AssertionError:
            found["bytes"] += 1
    return found


@pytest.mark.parametrize("places", [1, 2])
def test_the_scheme_itself_never_hangs(places: int) -> None:
    assert outcomes((Exchange,), places=places)["fine"] == 25


def test_launching_ahead_on_one_rank_hangs() -> None:
    assert outcomes((Exchange, Ahead))["deadlock"] > 5


def test_one_collective_later_on_one_rank_hangs_also_where_two_kernels_fit() -> None:
    assert outcomes((Exchange, Late))["deadlock"] > 5
    assert outcomes((Exchange, Late), places=2)["deadlock"] > 5


def test_the_same_order_of_launches_is_not_enough() -> None:
    """Without one of the two waits, a device that holds one kernel may begin with either of two."""
    assert outcomes((OneSided,))["deadlock"] > 0
    assert outcomes((Unordered,))["deadlock"] > 0
    assert outcomes((OneSided,), places=2)["deadlock"] == 0


def test_a_sub_buffer_used_too_early_shows_in_the_bytes() -> None:
    assert outcomes((Careless,), chunks=6)["bytes"] > 0


def test_an_optimizer_that_does_not_wait_for_the_packing_shows_in_the_bytes() -> None:
    assert outcomes((Torn,), chunks=6)["bytes"] > 0


def test_one_queue_for_all_streams() -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1. With the same order everywhere nothing hangs; with ours ahead it does."""
    assert outcomes((Exchange,), connections=1)["fine"] == 25
    assert outcomes((Exchange, Ahead), connections=1)["deadlock"] > 5


# ---- a hung operation of ours ends, the training goes on -----------------------------------------------


@QUICK
@given(seed=seeds, kind=st.sampled_from((Ahead, Late)))
def test_training_goes_on_after_a_wrong_order(seed: int, kind: type[Exchange]) -> None:
    ranks = trial(seed, (Exchange, kind), watched=True)
    assert all(rank.iterations == 3 for rank in ranks)
    for rank in ranks:
        assert torch.equal(rank.parameters, content(rank.rank, 3, 3 * PART))
        assert not rank.progress.busy
        if rank.progress.problem:
            assert len(rank.heard.said) == 1
            assert all(drained for _, drained in rank.heard.failures)
    if not any(rank.progress.problem for rank in ranks):
        assert words(ranks) != ""


@QUICK
@given(seed=seeds, n=st.integers(2, 4), silent=st.integers(0, 3))
def test_training_goes_on_where_one_rank_enqueues_nothing(seed: int, n: int, silent: int) -> None:
    links = build_ring(n, 2, [2 * PART] * n)
    world = World(n, seed)
    ranks = [Rank(world, r, links) for r in range(n)]
    world.communicators[silent % n].mute = True
    ranks[silent % n].heard.after_landing = lambda version, rank: None
    train(world, ranks, spread(links, 2, [Place(0, False, 1)], 1), 3)
    assert all(
        rank.iterations == 3 and torch.equal(rank.parameters, content(rank.rank, 3, 2 * PART)) for rank in ranks
    )
    hung = [rank for rank in ranks if silent % n in (links.targets[rank.rank][0], *links.list_sources(rank.rank, 0))]
    for rank in hung:
        if rank.rank != silent % n:
            assert "training waited" in rank.progress.problem
            assert {version for version, _ in rank.heard.failures} >= {1} - set(rank.heard.sendings)
            assert world.now >= 1.5


@QUICK
@given(seed=seeds, dies=st.integers(1, 400))
def test_a_dead_peer_is_not_waited_for_by_us(seed: int, dies: int) -> None:
    """The training's own collectives hang then, as they do without us. What is left of ours holds nobody up, and ends
    with the training."""
    links = build_ring(3, 2, [2 * PART] * 3)
    world = World(3, seed)
    ranks = [Rank(world, r, links) for r in range(3)]
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1
        if steps == dies:
            world.kill(2)

    def running() -> list[Any]:
        queues = [stream.queue for device in world.devices[:2] for stream in device.streams]
        return [op for queue in queues for op in list(queue)[:1] if op.name == "exchange"]

    world.looks.append(count)
    with suppress(Deadlock):
        train(world, ranks, spread(links, 2, [Place(0, False, 1)], 1), 3)
    world.hosts.clear()
    if running():  # then the training waits for none of them
        assert all(not rank.network[0].queue and not rank.device.training.queue for rank in ranks[:2])
    for rank in ranks:
        rank.progress.fail("the training has ended")
    with suppress(Deadlock):
        world.run()
    assert not running()


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_without_a_slot_or_a_version_takes_part_all_the_same(seed: int) -> None:
    links = build_ring(3, 2, [2 * PART] * 3)
    world = World(3, seed)
    ranks = [
        Rank(world, r, links, skips=frozenset({2}) if r == 0 else frozenset(), slotless=r == 2) for r in range(3)
    ]
    ranks[1].heard.after_landing = lambda version, rank: None  # what rank 0 sent as version 2 is none
    train(world, ranks, spread(links, 2, [Place(0, False, 1)], 1), 3)
    assert [rank.progress.problem for rank in ranks] == ["", "", ""] and words(ranks) == ""
    assert ranks[0].heard.sendings == [1, 2, 3]
    assert ranks[0].heard.landings == [(1, 2), (2, 2), (3, 2)]
    assert ranks[2].heard.landings == [] and ranks[2].slots == {}
