"""A training on devices that exist only in fake_device.py, with the exchange's hooks in it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gemini_hpc.core.chunks import cut_chunks
from gemini_hpc.train.nccl.exchange import Exchange, Links, Save
from gemini_hpc.train.nccl.own_copy import OwnCopy, Piecework
from gemini_hpc.train.nccl.progress import Progress
from gemini_hpc.train.nccl.source import Piece, Tensors

from .fake_device import Heard, World

PART = 8
COLLECTIVES = 3


def content(rank: int, version: int, size: int) -> torch.Tensor:
    return ((torch.arange(size) * 13 + rank * 31 + version * 7) % 251).to(torch.uint8)


@dataclass
class Rank:
    """One rank's training with our hooks in it."""

    world: World
    rank: int
    links: Links
    groups: int = 1  # communicators of the training, used in turn
    skips: frozenset[int] = frozenset()  # versions that this rank has nothing of
    heard: Heard = field(default_factory=Heard)
    slots: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    slotless: bool = False
    kind: type[Exchange] = Exchange
    iterations: int = 0

    def __post_init__(self) -> None:
        size = self.links.sizes[self.rank]
        self.device = self.world.devices[self.rank]
        self.communicator = self.world.communicators[self.rank]
        self.parameters = content(self.rank, 0, size)
        self.progress = Progress(
            self.communicator, self.links.sizes, self.heard, self.heard.said.append, clock=self.world.clock
        )
        self.exchange = self.kind(self.device, self.communicator, self.rank, self.links, 2, PART, self.progress)
        self.own = OwnCopy(self.device, self.exchange.copies)
        third = size // 3
        self.tensors = Tensors([Piece(0, self.parameters[:third]), Piece(third, self.parameters[third:])])
        self.work = tuple(
            Piecework(after, offset, length)
            for after, (offset, length) in zip((0, 1, 1, -1, -1, -1), cut_chunks(size, PART - 1), strict=False)
        )
        self.own_slots: dict[int, torch.Tensor] = {}
        self.network = [self.device.create_stream() for _ in range(self.groups)]
        self.heard.after_landing = self.check
        self.world.looks.append(self.progress.poll_operations)

    def check(self, version: int, rank: int) -> None:
        assert torch.equal(self.slots[version, rank], content(rank, version, self.links.sizes[rank]))

    def into(self, version: int) -> Callable[[int], torch.Tensor | None]:
        def find(rank: int) -> torch.Tensor | None:
            if self.slotless:
                return None
            return self.slots.setdefault((version, rank), torch.zeros(self.links.sizes[rank], dtype=torch.uint8))

        return find

    def collective(self, iteration: int, k: int) -> Any:
        """As torch does it: on a stream of the communicator, after what the training has enqueued."""
        stream = self.network[k % self.groups]
        stream.wait(self.device.get_current_stream().record())
        self.world.collective(self.rank, stream, (iteration, k), len(self.links.sizes))
        return stream.record()

    def host(self, versions: int, blocks: bool, every: int = 1) -> Generator[Callable[[], bool] | None, None, None]:
        """The training: after the optimizer of iteration v the parameters are those of version v."""
        training = self.device.get_current_stream()
        for version in range(1, versions + 1):
            work = None
            for k in range(COLLECTIVES):
                training.put("compute", lambda: None)
                self.exchange.on_launching()
                self.own.on_launching(k)
                yield None
                work = self.collective(version, k)
                yield None
                self.exchange.on_launched(k % self.groups, work)
                yield None
                if k % 2:
                    training.wait(work)
            assert work is not None
            training.wait(work)
            if blocks:  # the loss is printed
                shown = training.record()
                yield shown.query
            self.own.enqueue_rest()
            self.exchange.prepare_for_gate()
            yield None
            training.put("optimizer", partial(self.step_to, version))
            yield None
            save = None
            if version % every == 0:
                self.own_slots[version] = torch.zeros_like(self.parameters)
                own = self.own.begin_copy(self.tensors, self.own_slots[version], self.work)
                mine = version not in self.skips
                save = Save(version, self.tensors if mine else None, own if mine else None, self.into(version))
            self.exchange.step(save)
            yield None
            self.iterations = version
        self.exchange.finish()

    def step_to(self, version: int) -> None:
        self.parameters.copy_(content(self.rank, version, self.parameters.numel()))
