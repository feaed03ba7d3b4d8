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

from gemini_hpc.train.state import encode, rng
from gemini_hpc.train.state.loader import StatefulLoader


class Squares(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def take(loader: StatefulLoader, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader.forever(), count)]


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


def test_workers_prefetch_does_not_count() -> None:
    def make(workers: int) -> StatefulLoader:
        return StatefulLoader(Squares(64), 4, seed=3, num_workers=workers)

    whole = take(make(0), 24)
    loader = make(1)
    stream = loader.forever()
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
    batches = loader.forever()
    next(batches)
    position, states = loader.state_dict(), rng.capture()
    wanted = [(next(batches).tolist(), torch.rand(2).tolist()) for _ in range(3)]
    again = StatefulLoader(Drawing(12), 2, seed=3)
    again.load_state_dict(position)
    torch.rand(5)
    again.before_next_batch(lambda: rng.restore(states))
    batches = again.forever()
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
    loader.between_batches(lambda: seen.append((loader.state_dict()["epoch"], loader.state_dict()["batches"])))
    for _ in range(2):
        list(itertools.islice(loader, 3))
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    list(loader)
    assert seen[6:] == [(2, 0), (2, 1), (2, 2)]
