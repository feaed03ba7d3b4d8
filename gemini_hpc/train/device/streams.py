"""Positions of CUDA in the work that the training's threads have launched, as events on its streams.

No call here waits for the device: events are read when they are complete.

The end of an asynchronous operation is an event on a side stream of ours. The side stream waits for the operation
through the work's *future*. `work.wait()` would do the same, but would also tell torch's allocator that the caller
has waited. The operation's tensors could then be reused while NCCL still reads them. The future instead keeps the
memory of its results from reuse until our side stream has come that far.

DDP's buckets live on anyway. FSDP2's collectives run on the current stream and have no work. Results that are made
anew each time (functional collectives) are freed that much later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.device.cuda import CudaEvent, CurrentLaunches
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.device.progress import Device

_cuda: Any = torch.cuda  # untyped


class Streams(CurrentLaunches):
    """A `Device` that marks the current CUDA device of each thread that launches."""

    backend = "nccl"

    def __init__(self) -> None:
        self._side: dict[int, Any] = {}

    def record_mark(self) -> Event:
        """Record an event behind all that this thread has launched on its current stream."""
        return CudaEvent(torch.cuda.current_stream())

    def record_end(self, work: Any) -> Event:
        """Record an event at the end of a collective that this thread has just launched.

        Args:
            work: A `dist.Work`, or None where the collective runs on the current stream.
        """
        if work is None:
            return self.record_mark()
        future = work.get_future()
        device = torch.cuda.current_device()
        side = self._side.get(device)
        if side is None:
            side = self._side[device] = _cuda.Stream()
        with torch.cuda.stream(side):
            future.wait()
            return self.record_mark()


def _choose_streams(on_device: bool) -> Callable[[], Device] | None:
    nccl = on_device and dist.is_initialized() and Streams.backend in str(dist.get_backend_config())
    return Streams if nccl else None


# Returns the factory of a training's device; None where the training's collectives run on the host. Tests replace it.
choose_streams: Callable[[bool], Callable[[], Device] | None] = _choose_streams
