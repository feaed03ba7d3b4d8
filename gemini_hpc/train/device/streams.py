"""Where CUDA is in what the training's threads have launched: events on its streams.

It never waits for the device: events are read when they are complete.

The end of an asynchronous operation is an event on a side stream of ours that is made to wait for it through the
work's *future*. `work.wait()` would do that too, but it also tells torch's allocator that the caller has waited: the
operation's tensors could be reused while NCCL still reads them. The future instead keeps the memory of its results
from reuse until our side stream has come that far. DDP's buckets live on anyway, and FSDP2's collectives run on the
current stream and have no work; results that are made anew each time (functional collectives) are freed that much
later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.device.cuda import CudaEvent
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.device.progress import Device

_cuda: Any = torch.cuda  # without types


class Streams:
    """A `Device`: the current one of each thread that launches."""

    backend = "nccl"

    def __init__(self) -> None:
        self._side: dict[int, Any] = {}

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def grouping(self) -> bool:
        return bool(dist.distributed_c10d._world.pg_coalesce_state)

    def here(self) -> Event:
        return CudaEvent(torch.cuda.current_stream())

    def end(self, work: Any) -> Event:
        if work is None:
            return self.here()
        future = work.get_future()
        device = torch.cuda.current_device()
        side = self._side.get(device)
        if side is None:
            side = self._side[device] = _cuda.Stream()
        with torch.cuda.stream(side):
            future.wait()
            return self.here()


def _of_training(on_device: bool) -> Callable[[], Device] | None:
    nccl = on_device and dist.is_initialized() and Streams.backend in str(dist.get_backend_config())
    return Streams if nccl else None


# What makes the device of a training, if its state is on one; None: its collectives are the host's. Tests bring
# another.
of_training: Callable[[bool], Callable[[], Device] | None] = _of_training
