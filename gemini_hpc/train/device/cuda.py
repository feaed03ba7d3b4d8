"""Streams, events and pinned memory of CUDA, through torch.

A thread that has never selected a device uses device 0. Its first CUDA call would create a context there, of some
hundred MB, in each process of a node. Our threads therefore select their device before each CUDA call.

While a thread captures a CUDA graph (in torch's usual mode), CUDA queries of other threads fail and make the capture
fail. Queries that may come from another thread therefore run in CUDA's relaxed capture mode.
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

_cuda: Any = torch.cuda  # untyped


_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@cache
def _load_exchange() -> Any:
    """Return the loaded CUDA runtime's cudaThreadExchangeStreamCaptureMode.

    Return None where the runtime that torch has loaded cannot be found or lacks the function.
    """
    try:
        found = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        return found.cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


@contextmanager
def _allow_any_thread(index: int) -> Iterator[None]:
    """Select this device and do not disturb a graph that another thread captures."""
    exchange, mode = _load_exchange(), ctypes.c_int(_RELAXED)
    with torch.cuda.device(index):
        if exchange is not None:
            exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            if exchange is not None:
                exchange(ctypes.byref(mode))


class CudaEvent:
    """A `torch.cuda.Event` that records its time."""

    def __init__(self, stream: Any) -> None:
        self._index = stream.device_index
        self.event = _cuda.Event(enable_timing=True)
        self.event.record(stream)

    def query(self) -> bool:
        """Return whether the stream has reached this event."""
        with _allow_any_thread(self._index):
            return bool(self.event.query())

    def count_seconds_since(self, earlier: Any) -> float:
        """Return the seconds from another event to this one; both must have been reached."""
        with _allow_any_thread(self._index):
            return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """A `Stream` on top of a `torch.cuda.Stream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def key(self) -> Hashable:
        """Return the stream's device number and CUDA handle."""
        return self.stream.device_index, self.stream.cuda_stream

    def record(self) -> Event:
        """Record an event behind everything enqueued so far."""
        return CudaEvent(self.stream)

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for an event."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def wait_work(self, work: Any) -> None:
        """Make later work on this stream wait for a collective of the training.

        The stream waits through the work's future, see `streams`: `work.wait()` would tell torch's allocator that the
        training has waited.

        Args:
            work: A `dist.Work`, or None for an operation on the current stream. The caller's wait for that stream is
                then enough.

        Raises:
            Broken: The collective cannot be followed.
        """
        if work is None:
            return
        with torch.cuda.stream(self.stream):
            try:
                work.get_future().wait()
            except RuntimeError as error:
                raise Broken(f"a collective of the training cannot be followed: {error}") from None

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy from `source` into `into`."""
        self.copy_all([(into, source)])

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue a copy from the second of each pair into the first."""
        with torch.no_grad(), _allow_any_thread(self.stream.device_index), torch.cuda.stream(self.stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)


class CurrentLaunches:
    """State of the calling thread that rules out launches of our own."""

    def is_capturing(self) -> bool:
        """Return whether the calling thread captures a CUDA graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def is_grouping(self) -> bool:
        """Return whether the training has an open bracket that gathers operations."""
        return bool(dist.distributed_c10d._world.pg_coalesce_state)


class CudaDevice(CurrentLaunches):
    """A CUDA device, given by number or else the current one of the thread that creates this object."""

    def __init__(self, index: int | None = None) -> None:
        self.index: int = torch.cuda.current_device() if index is None else index

    def create_stream(self) -> Stream:
        """Create a stream on this device."""
        return CudaStream(_cuda.Stream(self.index))

    def get_current_stream(self) -> Stream:
        """Return the stream of this device on which the calling thread enqueues."""
        return CudaStream(torch.cuda.current_stream(self.index))

    def allocate_buffer(self, size_bytes: int) -> torch.Tensor:
        """Allocate device memory of `size_bytes` bytes, as uint8."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", self.index))


def get_handle(stream: Stream) -> int:
    """Return the stream's CUDA handle, as NCCL takes it."""
    assert isinstance(stream, CudaStream)
    return int(stream.stream.cuda_stream)


class Pinned:
    """A pinned mapping of replica memory, to and from which CUDA copies without staging.

    The pages of the mapping stay where they are. The mapping must be populated.
    """

    def __init__(self, memory: torch.Tensor, index: int | None = None) -> None:
        """Pin a mapping.

        Copies also work without a pinned mapping, but then hold the host up.

        Args:
            memory: The mapping, as a uint8 tensor.
            index: Number of the device. The default is the thread's current device.

        Raises:
            RuntimeError: CUDA refuses to pin the mapping (too much locked memory, an old driver).
        """
        self._memory: torch.Tensor | None = memory
        self._index = torch.cuda.current_device() if index is None else index
        with _allow_any_thread(self._index):
            self._runtime = _cuda.cudart()
            result = self._runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
            if int(result):
                with suppress(RuntimeError):  # CUDA reports an error again at the thread's next call: use it up here
                    torch.zeros(1, device=torch.device("cuda", self._index))
        if int(result):
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            locked = "" if limit == resource.RLIM_INFINITY else f" (ulimit -l: {limit >> 10} KiB may be locked)"
            why = self._runtime.cudaGetErrorString(result)
            raise RuntimeError(f"CUDA could not pin {memory.numel()} bytes of replica memory: {why}{locked}")

    def release(self) -> None:
        """Unpin the mapping. Call before the mapping ends, when the device has finished its copies."""
        memory, self._memory = self._memory, None
        if memory is not None:
            with _allow_any_thread(self._index):
                self._runtime.cudaHostUnregister(memory.data_ptr())  # fails where CUDA has shut down before us


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process
