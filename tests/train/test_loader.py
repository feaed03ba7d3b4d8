"""The loader's position: batches taken, not prefetched; the same order whether interrupted or not."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

import gemini_hpc as gemini
from gemini_hpc.train.state import encode, rng
from gemini_hpc.train.state.loader import StatefulLoader

from .fake_agent import FakeJob
from .test_checkpointer import wait_armed, wait_sealed


class Squares(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def take(loader: StatefulLoader, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader.iterate_forever(), count)]


@given(st.integers(5, 40), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 30), st.integers(0, 5))
def test_resume_anywhere(size: int, batch: int, world: int, drop: bool, at: int, seed: int) -> None:
    if size // world < batch:
        return

    def make() -> StatefulLoader:
        return StatefulLoader(Squares(size), batch, seed=seed, rank=world - 1, world=world, drop_last=drop)

    whole = take(make(), at + 12)
    first = make()
    assert take(first, at) == whole[:at]
    state = encode.decode(encode.encode(first.state_dict()))
    second = make()
    second.load_state_dict(state)
    assert take(second, 12) == whole[at:]


def dealt(loaders: list[StatefulLoader], count: int) -> list[int]:
    """The samples of so many batches of all ranks."""
    return [i for loader in loaders for batch in take(loader, count) for i in batch]


def ranks(batch: int, world: int, size: int = 60, seed: int = 5, **more: Any) -> list[StatefulLoader]:
    return [StatefulLoader(Squares(size), batch, seed=seed, rank=r, world=world, **more) for r in range(world)]


@given(
    st.tuples(st.integers(1, 6), st.integers(1, 4)),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3),
    st.integers(0, 6),
    st.booleans(),
)
def test_another_batch_size_or_world_reads_no_sample_twice_and_leaves_none_out(
    first: tuple[int, int], changes: list[tuple[int, int, int]], at: int, drop: bool
) -> None:
    """However often both change in an epoch. The end of the epoch drops less than a batch of all ranks."""
    loaders, seen = ranks(*first, size=100, drop_last=drop), list[int]()
    seen += dealt(loaders, min(at, len(loaders[0])))
    for batch, world, more in changes:
        state = encode.decode(encode.encode(loaders[0].state_dict()))
        loaders = ranks(batch, world, size=100, drop_last=drop)
        for loader in loaders:
            loader.load_state_dict(state)
        if loaders[0].epoch:
            break
        left = (100 - len(seen)) // (batch * world)
        seen += dealt(loaders, min(more, left))
        assert len(seen) == len(set(seen))
    if not loaders[0].epoch:
        seen += [i for loader in loaders for b in loader for i in b.tolist()]
        world = loaders[0].state_dict()["world"]
        dropped = world * loaders[0].state_dict()["batch_size"] if drop else world
        assert len(seen) == len(set(seen)) > 100 - dropped
        assert {loader.epoch for loader in loaders} == {1}


def test_what_was_dealt_anew_is_resumed_as_such() -> None:
    first = ranks(4, 1)[0]
    take(first, 3)
    second = ranks(2, 2)[0]
    second.load_state_dict(first.state_dict())
    whole = take(second, 30)
    third = ranks(2, 2)[0]
    third.load_state_dict(first.state_dict())
    take(third, 5)
    fourth = ranks(2, 2)[0]
    fourth.load_state_dict(third.state_dict())
    assert take(fourth, 25) == whole[5:]


def test_a_finished_epoch_is_finished_with_any_batch_size() -> None:
    first = ranks(7, 1)[0]
    take(first, len(first))
    second = ranks(1, 1)[0]
    second.load_state_dict(first.state_dict())
    assert second.epoch == 1 and take(second, 1)[0] == take(ranks(1, 1)[0], 61)[60]


def test_other_data_in_mid_epoch_is_refused_by_name() -> None:
    first = ranks(4, 1)[0]
    with_none = first.state_dict()
    ranks(4, 1, size=50)[0].load_state_dict(with_none)
    take(first, 3)
    for other in (ranks(4, 1, size=50)[0], ranks(4, 1, shuffle=False)[0]):
        with pytest.raises(ValueError, match=r"had read 12 of 60 samples, this one has [56]0 samples"):
            other.load_state_dict(first.state_dict())
    take(first, 12)
    again = ranks(4, 1, size=50)[0]
    again.load_state_dict(first.state_dict())
    assert again.epoch == 1


def test_more_data_in_order_goes_on() -> None:
    first = ranks(4, 1, shuffle=False)[0]
    take(first, 3)
    longer = ranks(4, 1, size=80, shuffle=False)[0]
    longer.load_state_dict(first.state_dict())
    assert take(longer, 1) == [[12, 13, 14, 15]]
    with pytest.raises(ValueError, match="12 of 60 samples in order, this one has 8 samples in order"):
        ranks(4, 1, size=8, shuffle=False)[0].load_state_dict(first.state_dict())


def test_an_older_releases_position_counts_batches() -> None:
    loader = ranks(4, 1)[0]
    loader.load_state_dict({"epoch": 1, "batches": 2, "seed": 5})
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 2)


def test_workers_prefetch_does_not_count() -> None:
    def make(workers: int) -> StatefulLoader:
        return StatefulLoader(Squares(64), 4, seed=3, num_workers=workers)

    whole = take(make(0), 24)
    loader = make(1)
    stream = loader.iterate_forever()
    assert [next(stream).tolist() for _ in range(9)] == whole[:9]
    state = loader.state_dict()
    assert state["batches"] == 9
    stream.close()
    other = make(1)
    other.load_state_dict(state)
    assert take(other, 15) == whole[9:]


def test_ranks_share_an_epoch_without_overlap() -> None:
    seen = [
        i for rank in range(3) for b in StatefulLoader(Squares(31), 5, seed=1, rank=rank, world=3) for i in b.tolist()
    ]
    assert len(seen) == len(set(seen)) == 30


class Drawing(Squares):
    """Augments by what it draws from the global generator."""

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        return index + float(torch.rand(()))


def test_what_makes_a_batch_draws_from_the_restored_generators() -> None:
    """Without workers the batch is made in this process, after what step() has captured."""
    loader = StatefulLoader(Drawing(12), 2, seed=3)
    batches = loader.iterate_forever()
    next(batches)
    position, states = loader.state_dict(), rng.capture()
    wanted = [(next(batches).tolist(), torch.rand(2).tolist()) for _ in range(3)]
    again = StatefulLoader(Drawing(12), 2, seed=3)
    again.load_state_dict(position)
    torch.rand(5)
    again.run_before_next_batch(lambda: rng.restore(states))
    batches = again.iterate_forever()
    assert [(next(batches).tolist(), torch.rand(2).tolist()) for _ in range(3)] == wanted


def test_the_epoch_is_the_next_batchs() -> None:
    loader = StatefulLoader(Squares(6), 2, seed=3)
    batches = iter(loader)
    assert [(next(batches).numel(), loader.epoch)[1] for _ in range(3)] == [0, 0, 1]


def test_epochs_differ_and_end() -> None:
    loader = StatefulLoader(Squares(12), 4, seed=1)
    first, second = [b.tolist() for b in loader], [b.tolist() for b in loader]
    assert len(first) == len(second) == len(loader) == 3
    assert first != second
    assert [sorted(itertools.chain(*epoch)) for epoch in (first, second)] == [list(range(12))] * 2


def test_global_generators_are_untouched() -> None:
    torch.manual_seed(1)
    before = encode.encode(rng.capture())
    take(StatefulLoader(Squares(64), 4, seed=3, num_workers=2), 20)
    assert encode.encode(rng.capture()) == before


def test_errors_are_clear() -> None:
    with pytest.raises(ValueError, match="no batch"):
        StatefulLoader(Squares(3), 4)
    with pytest.raises(ValueError, match="rank"):
        StatefulLoader(Squares(30), 4, rank=2, world=2)
    with pytest.raises(ValueError, match="seed"):
        StatefulLoader(Squares(30), 4, seed=1).load_state_dict({"epoch": 0, "batches": 0, "seed": 2})


def test_restore_in_mid_iteration_is_refused() -> None:
    loader = StatefulLoader(Squares(30), 4)
    stream = iter(loader)
    next(stream)
    loader.load_state_dict({"epoch": 0, "batches": 0, "seed": 0})
    with pytest.raises(RuntimeError, match="new iterator"):
        next(stream)


def test_all_generators_come_back() -> None:
    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        random.gauss(0, 1)  # leaves a second value behind
        np.random.normal()
        state = encode.decode(encode.encode(rng.capture()))

        def draw() -> tuple[float, ...]:
            return (torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand())

        wanted = draw()
        draw()
        rng.restore(state)
        assert draw() == wanted


@pytest.mark.parametrize("workers", [0, 1])
def test_between_batches_the_position_is_that_of_what_is_done(workers: int) -> None:
    """Also where nobody asks for what comes after an epoch's last batch before the next epoch begins."""
    loader = StatefulLoader(Squares(12), 4, seed=3, num_workers=workers)
    seen: list[tuple[int, int]] = []
    loader.run_between_batches(lambda: seen.append((loader.state_dict()["epoch"], loader.state_dict()["batches"])))
    for _ in range(2):
        list(itertools.islice(loader, 3))
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    list(loader)
    assert seen[6:] == [(2, 0), (2, 1), (2, 2)]


class Counting:
    """Somebody's own loader, whose position is a number of batches."""

    def __init__(self, batch_size: int, size: int) -> None:
        self.batch_size, self.dataset, self.at = batch_size, Squares(size), 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_what_another_loader_may_count_in_is_told_where_it_differs(
    job: FakeJob, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(loader: Counting, stop: int) -> list[str]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gemini.Checkpointer(model, optimizer, loader=loader) as ckpt:
            for step in range(ckpt.resume(), stop):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                loader.at += 1
                ckpt.step()
                if not step:
                    wait_armed(ckpt)
        return [line for line in capfd.readouterr().err.splitlines() if "was captured with" in line]

    job.stop_after(3)
    assert run(Counting(4, 20), 4) == []
    wait_sealed(job, 3)
    job.requeue()
    job.stop_after(3)
    assert run(Counting(4, 20), 3) == []
    job.requeue()
    (line,) = run(Counting(2, 30), 3)
    assert "the loader was captured with batch_size 4, now 2; samples 20, now 30" in line
