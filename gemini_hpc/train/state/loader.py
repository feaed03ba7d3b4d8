"""A shuffled multi-worker data loader whose position can be captured and restored to the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gemini_hpc.core.numbers import check_argument, check_count


class _EpochSampler:
    """The indices of an epoch for a rank.

    Every rank has the same permutation, dealt round robin. The part before `start` is dealt already. Of the rest,
    this rank leaves out its first `skip`.
    """

    def __init__(self, size: int, *, seed: int, rank: int, world: int, shuffle: bool) -> None:
        self.size, self.world, self.shuffle = size, world, shuffle
        self._seed, self._rank = seed, rank
        self.epoch = 0
        self.start = 0
        self.skip = 0

    def __len__(self) -> int:
        return self.size // self.world

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed((self._seed * 1_000_003 + self.epoch) & (2**63 - 1))
            order = torch.randperm(self.size, generator=generator, device="cpu")
        else:
            order = torch.arange(self.size, device="cpu")
        rest = order[self.start :]
        usable = len(rest) // self.world * self.world
        yield from rest[self._rank : usable : self.world][self.skip :].tolist()


class StatefulLoader:
    """Batches of `dataset`, shuffled anew in every epoch and dealt to `world` ranks.

    `for batch in loader` gives one epoch (the rest of the current one after a restore). `loader.iterate_forever()`
    goes on through the epochs.

    The state is (epoch, batches that the training loop has taken): prefetched batches do not count. The state also
    records which samples those batches had. With another batch size or world the rest of the epoch is dealt anew, and
    no sample is read twice.

    Shuffling depends on (seed, epoch) only and uses generators of its own. So the global ones are untouched, and the
    order is the same in an interrupted run. Each epoch drops the up to `world - 1` samples that do not divide evenly,
    and the last incomplete batch unless `drop_last=False`.

    Random augmentation in workers is seeded from (seed, epoch). A resumed epoch starts fresh workers, whose random
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
        check_count("world", world, 1)
        check_argument("rank", rank, f"a whole number from 0 to {world - 1}", lambda r: 0 <= r < world, whole=True)
        check_count("batch_size", batch_size, 1)
        check_argument("seed", seed, "a whole number", whole=True)
        if not hasattr(dataset, "__len__"):
            raise TypeError(f"dataset is a {type(dataset).__name__}, which has no len(): wanted a map-style dataset")
        size = len(dataset)
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
        self._start = 0  # samples of this epoch that were dealt to all ranks with another batch size or world
        self._taken = 0  # batches taken after _start
        self._restored = 0
        self._before_batch: Callable[[], None] | None = None
        self._between: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        return _count_batches(len(self._sampler), self._batch_size, drop_last=self._loader.drop_last)

    @property
    def _all(self) -> int:
        """Return the number of batches in this epoch from `_start` on."""
        samples = (self._sampler.size - self._start) // self._sampler.world
        return _count_batches(samples, self._batch_size, drop_last=self._loader.drop_last)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next batch."""
        return self._epoch + (self._taken >= self._all)

    @property
    def dealt_anew(self) -> bool:
        """Return whether the rest of this epoch is dealt in another batch size or to another number of ranks."""
        return self._start > 0

    def run_before_next_batch(self, call: Callable[[], None]) -> None:
        """Run `call` once, just before the next batch is made. The checkpointer restores the RNG there."""
        self._before_batch = call

    def run_between_batches(self, call: Callable[[], None]) -> None:
        """Run `call` at every request for a batch, before the batch is read.

        The training has then finished with the batch before.
        """
        self._between = call

    def __iter__(self) -> Iterator[Any]:
        if self._taken >= self._all:
            self._move_to(self._epoch + 1)
        self._between()
        epoch, started = self._epoch, self._restored
        self._sampler.epoch, self._sampler.start = epoch, self._start
        self._sampler.skip = self._taken * self._batch_size
        self._generator.manual_seed((self._seed * 1_000_003 + epoch) & (2**63 - 1))
        if not self._loader.num_workers:  # then the batch is made in this process and may draw from its generators
            self._call_before_batch()
        for batch in self._create_iterator():
            if self._restored != started:
                raise RuntimeError("the loader's position was restored during iteration: start a new iterator")
            self._taken += 1
            self._call_before_batch()
            yield batch
            if self._taken < self._all:
                self._between()
        self._move_to(epoch + 1)

    def _move_to(self, epoch: int, start: int = 0, taken: int = 0) -> None:
        self._epoch, self._start, self._taken = epoch, start, taken

    def _create_iterator(self) -> Iterator[Any]:
        """Return an iterator of torch's loader.

        The loader draws a number where its generator is, so its default device must be the host.
        """
        on_host = torch.get_default_device().type == "cpu"
        with nullcontext() if on_host else torch.device("cpu"):
            return iter(self._loader)

    def _call_before_batch(self) -> None:
        if self._before_batch is not None:
            call, self._before_batch = self._before_batch, None
            call()

    def iterate_forever(self) -> Iterator[Any]:
        """Yield all batches from the current position on, without an end."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, int]:
        """Return the position (epoch, batches taken) and the settings that these batches had."""
        return {
            "epoch": self._epoch,
            "batches": self._taken,
            "seed": self._seed,
            "start": self._start,
            "batch_size": self._batch_size,
            "world": self._sampler.world,
            "samples": self._sampler.size,
            "shuffle": self._sampler.shuffle,
            "drop_last": self._loader.drop_last,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position.

        With another batch size or world the rest of the epoch is dealt anew.

        Raises:
            ValueError: The state is another loader's (its seed differs), or a position within an epoch of other data.
        """
        if state["seed"] != self._seed:
            raise ValueError(f"the captured loader was seeded with {state['seed']}, this one with {self._seed}")
        self._move_to(*self._translate_position(state))
        self._restored += 1

    def _translate_position(self, state: Mapping[str, int]) -> tuple[int, int, int]:
        """Return (epoch, start, batches since) in this loader's terms.

        Raises:
            ValueError: The position is within an epoch of other data.
        """
        epoch, taken, sampler = int(state["epoch"]), int(state["batches"]), self._sampler
        if "batch_size" not in state:  # written by a release that counted batches only
            return epoch, 0, taken
        start, batch_size, world, samples = (int(state[key]) for key in ("start", "batch_size", "world", "samples"))
        if (batch_size, world, samples, state["shuffle"]) == (
            self._batch_size,
            sampler.world,
            sampler.size,
            sampler.shuffle,
        ):
            return epoch, start, taken
        if not start + taken:
            return epoch, 0, 0
        if taken >= _count_batches((samples - start) // world, batch_size, drop_last=bool(state["drop_last"])):
            return epoch + 1, 0, 0
        dealt = start + taken * batch_size * world
        in_order = not sampler.shuffle and not state["shuffle"]  # then other samples may be appended
        if (samples, state["shuffle"]) != (sampler.size, sampler.shuffle) and not (
            in_order and dealt <= sampler.size
        ):
            raise ValueError(
                f"the captured loader had read {dealt} of {_describe_data(samples, state['shuffle'])}, this one has "
                f"{_describe_data(sampler.size, sampler.shuffle)}: which of these are left in epoch {epoch} is "
                "unknown. Go on with the same data and change it at the end of an epoch, or submit a new job with "
                "`start`"
            )
        return epoch, dealt, 0


def _count_batches(samples: int, batch_size: int, *, drop_last: bool) -> int:
    whole, rest = divmod(samples, batch_size)
    return whole + (1 if rest and not drop_last else 0)


def _describe_data(samples: int, shuffle: int) -> str:
    return f"{samples} samples{'' if shuffle else ' in order'}"


def read_loader_units(loader: Any) -> dict[str, int]:
    """Return the units in which another loader's position may count: `batch_size` and number of samples.

    Only values that the loader shows are returned. A `StatefulLoader` compares its own.
    """
    found: dict[str, int] = {}
    if loader is None or isinstance(loader, StatefulLoader):
        return found
    for name, read in (("batch_size", lambda: loader.batch_size), ("samples", lambda: len(loader.dataset))):
        with suppress(Exception):  # a foreign class may lack these attributes
            value = read()
            if type(value) is int:
                found[name] = value
    return found
