"""Streams, events and pinned memory of CUDA, through torch.

A thread that has never said which device it means is on device 0: its first call would make a context there, of some
hundred MB, in each process of a node. So what threads of ours call says it each time.

While a thread captures a CUDA graph (in torch's usual mode), questions of other threads to CUDA fail, and the capture
with them. So what may come from another thread is asked in CUDA's relaxed mode.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.device.interface import Broken, Event, Stream

_cuda: Any = torch.cuda  # without types


_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@cache
def _exchange() -> Any:
    """cudaThreadExchangeStreamCaptureMode of the runtime that torch has loaded; None where it is not to be found."""
    try:
        found = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        return found.cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


@contextmanager
def _from_any_thread(index: int) -> Iterator[None]:
    """On this device, and not in the way of a graph that another thread captures."""
    exchange, mode = _exchange(), ctypes.c_int(_RELAXED)
    with torch.cuda.device(index):
        if exchange is not None:
            exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            if exchange is not None:
                exchange(ctypes.byref(mode))


class CudaEvent:
    """A `torch.cuda.Event` with a time."""

    def __init__(self, stream: Any) -> None:
        self._index = stream.device_index
        self.event = _cuda.Event(enable_timing=True)
        self.event.record(stream)

    def query(self) -> bool:
        with _from_any_thread(self._index):
            return bool(self.event.query())

    def seconds_since(self, earlier: Any) -> float:
        with _from_any_thread(self._index):
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
        self.copy_all([(into, source)])

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad(), _from_any_thread(self.stream.device_index), torch.cuda.stream(self.stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)


class CudaDevice:
    """The device of this number, or the current one of the thread that makes it."""

    def __init__(self, index: int | None = None) -> None:
        self.index: int = torch.cuda.current_device() if index is None else index

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

    def __init__(self, memory: torch.Tensor, index: int | None = None) -> None:
        """index: of the device; default, the thread's current one."""
        self._memory: torch.Tensor | None = memory
        self._index = torch.cuda.current_device() if index is None else index
        with _from_any_thread(self._index):
            self._runtime = _cuda.cudart()
            result = self._runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
            if int(result):
                with suppress(RuntimeError):  # CUDA remembers an error for the thread's next call: let it be this one
                    torch.zeros(1, device=torch.device("cuda", self._index))
        if int(result):
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            locked = "" if limit == resource.RLIM_INFINITY else f" (ulimit -l: {limit >> 10} KiB may be locked)"
            why = self._runtime.cudaGetErrorString(result)
            raise RuntimeError(f"CUDA could not pin {memory.numel()} bytes of replica memory: {why}{locked}")

    def release(self) -> None:
        """Before the mapping ends; the device must be done with it."""
        memory, self._memory = self._memory, None
        if memory is not None:
            with _from_any_thread(self._index):
                self._runtime.cudaHostUnregister(memory.data_ptr())  # may be refused where CUDA has ended before us


_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process
