"""Streams, events and pinned memory of CUDA, through torch. Nothing in this file has run on a GPU."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.nccl.device import Broken, Event, Stream

_cuda: Any = torch.cuda  # without types


class CudaEvent:
    """A `torch.cuda.Event` with a time."""

    def __init__(self, stream: Any) -> None:
        self.event = _cuda.Event(enable_timing=True)
        self.event.record(stream)

    def query(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: Any) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """A `torch.cuda.Stream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def key(self) -> Hashable:
        return self.stream.device_index, self.stream.cuda_stream

    def record(self) -> Event:
        return CudaEvent(self.stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def follow(self, work: Any) -> None:
        """work: a `dist.Work`, or None for an operation on the current stream, for which the caller's wait for that
        stream is enough. Through the future, see `streams`: `work.wait()` would tell torch's allocator that the
        training has waited."""
        if work is None:
            return
        with torch.cuda.stream(self.stream):
            try:
                work.get_future().wait()
            except RuntimeError as error:
                raise Broken(f"a collective of the training cannot be followed: {error}") from None

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad(), torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)


class CudaDevice:
    """The current device of the thread that makes it."""

    def __init__(self) -> None:
        self.index: int = torch.cuda.current_device()

    def stream(self) -> Stream:
        return CudaStream(_cuda.Stream(self.index))

    def current(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.index))

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", self.index))

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def grouping(self) -> bool:
        return bool(dist.distributed_c10d._world.pg_coalesce_state)


def handle(stream: Stream) -> int:
    """For NCCL."""
    assert isinstance(stream, CudaStream)
    return int(stream.stream.cuda_stream)


class Pinned:
    """A mapping of replica memory that CUDA copies to and from without staging: the pages stay where they are. The
    mapping must be populated. Raises RuntimeError where CUDA refuses (too much locked memory, an old driver); copies
    then still work, but hold the host up."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory
        self._runtime = _cuda.cudart()
        _check(self._runtime, self._runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))

    def release(self) -> None:
        """Before the mapping ends; the device must be done with it."""
        if self._memory is not None:
            _check(self._runtime, self._runtime.cudaHostUnregister(self._memory.data_ptr()))
            self._memory = None


def _check(runtime: Any, result: Any) -> None:
    if int(result) != 0:
        raise RuntimeError(f"CUDA could not pin or unpin replica memory: {runtime.cudaGetErrorString(result)}")
