"""A shuffled multi-worker data loader whose position can be captured and restored to the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class _EpochSampler:
    """Indices of one epoch for one rank: the same permutation on every rank, dealt round robin."""

    def __init__(self, size: int, *, seed: int, rank: int, world: int, shuffle: bool) -> None:
        self._size, self._seed, self._rank, self._world, self._shuffle = size, seed, rank, world, shuffle
        self.epoch = 0
        self.skip = 0

    def __len__(self) -> int:
        return self._size // self._world

    def __iter__(self) -> Iterator[int]:
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed((self._seed * 1_000_003 + self.epoch) & (2**63 - 1))
            order = torch.randperm(self._size, generator=generator, device="cpu")
        else:
            order = torch.arange(self._size, device="cpu")
        usable = len(self) * self._world
        yield from order[self._rank : usable : self._world][self.skip :].tolist()


class StatefulLoader:
    """Batches of `dataset`, shuffled anew in every epoch, dealt to `world` ranks.

    `for batch in loader` gives one epoch (the rest of the current one after a restore); `loader.forever()` goes on
    through the epochs. The state is (epoch, batches that the training loop has taken): prefetched batches do not
    count. Shuffling depends on (seed, epoch) only and uses generators of its own, so the global ones are untouched
    and the order is the same whether or not a run was interrupted. Each epoch drops the up to `world - 1` samples
    that do not divide evenly, and the last incomplete batch unless `drop_last=False`.

    Random augmentation in workers is seeded from (seed, epoch): a resumed epoch starts fresh workers, whose random
    streams are those of the epoch's start.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        num_workers: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside 0..{world - 1}")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: at least 1 is needed")
        size = len(dataset)  # type: ignore[arg-type]
        self._sampler = _EpochSampler(size, seed=seed, rank=rank, world=world, shuffle=shuffle)
        self._batch_size, self._seed = batch_size, seed
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._sampler,
            num_workers=num_workers,
            drop_last=drop_last,
            collate_fn=collate_fn,
            generator=self._generator,
        )
        if len(self) == 0:
            raise ValueError(
                f"a dataset of {size} samples gives rank {rank} of {world} no batch of {batch_size}: "
                "use a smaller batch or drop_last=False"
            )
        self._epoch = 0
        self._taken = 0
        self._restored = 0
        self._before_batch: Callable[[], None] | None = None
        self._between: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        samples = len(self._sampler)
        whole, rest = divmod(samples, self._batch_size)
        return whole + (1 if rest and not self._loader.drop_last else 0)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch + (self._taken >= len(self))

    def before_next_batch(self, call: Callable[[], None]) -> None:
        """Run `call` once, just before the next batch is made (the checkpointer restores the RNG there)."""
        self._before_batch = call

    def between_batches(self, call: Callable[[], None]) -> None:
        """Run `call` whenever a batch is asked for, before it is read: what was done with the one before is done."""
        self._between = call

    def __iter__(self) -> Iterator[Any]:
        if self._taken >= len(self):
            self._epoch, self._taken = self._epoch + 1, 0
        self._between()
        epoch, started = self._epoch, self._restored
        self._sampler.epoch, self._sampler.skip = epoch, self._taken * self._batch_size
        self._generator.manual_seed((self._seed * 1_000_003 + epoch) & (2**63 - 1))
        if not self._loader.num_workers:  # then what makes the batch may draw from this process's generators
            self._call_before_batch()
        for batch in self._begin():
            if self._restored != started:
                raise RuntimeError("the loader's position was restored during iteration: start a new iterator")
            self._taken += 1
            self._call_before_batch()
            yield batch
            if self._taken < len(self):
                self._between()
        self._epoch, self._taken = epoch + 1, 0

    def _begin(self) -> Iterator[Any]:
        """Return an iterator of torch's loader, which draws a number for itself where its generator is."""
        on_host = torch.get_default_device().type == "cpu"
        with nullcontext() if on_host else torch.device("cpu"):
            return iter(self._loader)

    def _call_before_batch(self) -> None:
        if self._before_batch is not None:
            call, self._before_batch = self._before_batch, None
            call()

    def forever(self) -> Iterator[Any]:
        """All batches from the current position on, without an end."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, int]:
        """The position: epoch and batches taken from it."""
        return {"epoch": self._epoch, "batches": self._taken, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position. Raises ValueError if it is another loader's (seed differs)."""
        if state["seed"] != self._seed:
            raise ValueError(f"the captured loader was seeded with {state['seed']}, this one with {self._seed}")
        self._epoch, self._taken = int(state["epoch"]), int(state["batches"])
        self._restored += 1
