"""Source of the bytes of a shard's tensor area, read chunk by chunk from the training's tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gemini_hpc.train.device.interface import Event, Stream


class Piece(NamedTuple):
    """A tensor and the offset of its bytes in the area."""

    start: int
    view: torch.Tensor


class Tensors:
    """The pieces of a tensor area, in order of their offsets and without overlap.

    A view that is not contiguous in memory is staged. Staging needs device memory of the view's size, and
    `enqueue_staging` must be called for each version.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces: list[tuple[int, torch.Tensor]] = []
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ready: Event | None = None
        end = 0
        for at, given in pieces:
            view = given.detach()
            if at < end:
                raise ValueError(f"the piece at {at} begins before the one before it ends, at {end}")
            if not view.is_contiguous():
                stage = torch.empty_like(view, memory_format=torch.contiguous_format)
                self._staged.append((stage, view))
                view = stage
            flat = view.reshape(-1).view(torch.uint8)
            end = at + flat.numel()
            self._pieces.append((at, flat))
        self._starts = [at for at, _ in self._pieces]

    def enqueue_staging(self, stream: Stream) -> None:
        """Enqueue the copies of non-contiguous views; `put` waits for them."""
        for stage, view in self._staged:
            stream.copy(stage, view)
        self._ready = stream.record() if self._staged else None

    def put(self, stream: Stream, into: torch.Tensor, offset: int) -> None:
        """Enqueue copies of all pieces in bytes offset..offset+len(into) of the area.

        Bytes between pieces are left as they are.
        """
        if self._ready is not None:
            stream.wait(self._ready)
        for start, part in self.iterate_parts(offset, offset + into.numel()):
            stream.copy(into[start - offset : start - offset + part.numel()], part)

    def iterate_parts(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (offset in the area, bytes) of each piece, or part of one, in start..stop."""
        for at, flat in self._pieces[max(0, bisect_right(self._starts, start) - 1) :]:
            if at >= stop:
                return
            first, last = max(start, at), min(stop, at + flat.numel())
            if first < last:
                yield first, flat[first - at : last - at]
