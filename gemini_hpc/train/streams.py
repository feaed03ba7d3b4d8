"""When operations of NCCL run on the device: events on CUDA streams.

This file has not run on a GPU. It never waits for the device: events are read when they are complete.

The end of an asynchronous operation is an event on a side stream of ours that is made to wait for it through the
work's *future*. `work.wait()` would do that too, but it also tells torch's allocator that the caller has waited: the
operation's tensors could be reused while NCCL still reads them. The future instead keeps the memory of its results
from reuse until our side stream has come that far, so this is done in recorded iterations only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_cuda: Any = torch.cuda  # without types


class Streams:
    """Events of the current device; used by the launching threads."""

    def __init__(self) -> None:
        self._side: dict[int, Any] = {}

    @staticmethod
    def capturing() -> bool:
        """A CUDA graph is being captured: no event may be asked or recorded now."""
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def here() -> Any:
        """An event where the current stream is now."""
        event = _cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, work: dist.Work | None) -> Any:
        """An event at the end of an operation that this thread has just launched; without a work it runs on the
        current stream (async_op=False). Raises RuntimeError for a work without a future."""
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

    @staticmethod
    def between_s(start: Any, end: Any) -> float:
        """Seconds from one event to another, both complete."""
        return float(start.elapsed_time(end)) / 1e3
