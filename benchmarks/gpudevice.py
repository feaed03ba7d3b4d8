"""The devices that `benchmarks.gpu` measures: a GPU with NCCL, or one of the tests, which only this process has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks import gpudigest
from gemini_hpc.train.device import cuda
from gemini_hpc.train.device.interface import Communicator, Device
from gemini_hpc.train.device.pins import Pin
from gemini_hpc.train.device.progress import Device as Progress
from gemini_hpc.train.device.streams import Streams
from gemini_hpc.train.nccl import platform
from gemini_hpc.train.nccl.communicator import NcclCommunicator
from gemini_hpc.train.nccl.exchange import Links


class Machine(Protocol):
    """place, backend: torch's names of the device and of its process groups; batch: rows that a training computes
    with; gathered_bytes: of a collective, copied in about a millisecond."""

    place: str
    backend: str
    batch: int
    gathered_bytes: int

    def names(self) -> dict[str, str]:
        """Return names and versions that describe the device, for people."""

    def row(self, name: str, value: str) -> None:
        """Print a figure."""

    def device(self) -> Device:
        """Return the device of copies and messages."""

    def progress(self) -> Progress:
        """Return the marks in what the training launches."""

    def lasts(self, seconds: float) -> None:
        """Set how long a computation takes, on a device that computes nothing."""

    def synchronize(self) -> None:
        """Wait until it has nothing to do."""

    def pin(self, memory: torch.Tensor) -> Pin:
        """Pin memory where it lies."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Return pinned memory of torch's own."""

    def undigested(self) -> str:
        """Return why the device makes no digests; "" where it does, and they are the processor's."""

    def beside(self, work: Callable[[], object]) -> None:
        """Enqueue beside what the training computes."""

    def lacking(self) -> str:
        """Return why the device has no messages; "" where it has."""

    def connect(self) -> Communicator:
        """Return the communicator of one rank with itself."""


class Gpu:
    """The current CUDA device."""

    place, backend, batch, gathered_bytes = "cuda", "nccl", 2048, 1 << 30

    def __init__(self) -> None:
        self._library, self._missing = platform.load_library()
        self._beside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def names(self) -> dict[str, str]:
        nccl = f"NCCL {self._library.version if self._library is not None else 'is not there'}"
        return {torch.cuda.get_device_name(): nccl}

    def row(self, name: str, value: str) -> None:
        print(f"{name:<58}{value:>18}", flush=True)

    def device(self) -> Device:
        return cuda.CudaDevice()

    def progress(self) -> Progress:
        return Streams()

    def lasts(self, seconds: float) -> None:
        pass

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def pin(self, memory: torch.Tensor) -> Pin:
        return cuda.Pinned(memory)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def undigested(self) -> str:
        return gpudigest.find_fault(torch.device("cuda", torch.cuda.current_device()))

    def beside(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._beside):
            work()

    def lacking(self) -> str:
        return self._missing or platform.check_environment()

    def connect(self) -> Communicator:
        assert self._library is not None
        made = NcclCommunicator(self._library, 0, 1, cuda.get_handle)
        made.connect(self._library.create_unique_id(), 60.0)
        return made


class Fake:
    """The tests' devices: one runs what it is given, in an order of its own, the other only takes the time."""

    place, backend, batch, gathered_bytes = "cpu", "gloo", 16, 1 << 10

    def __init__(self) -> None:
        from tests.train.fake_gpu import FakePlatform
        from tests.train.fake_kernel import FakeKernel
        from tests.train.timed_device import LaggingDevice

        self._platform: Any = FakePlatform({}, 0)
        self._device: Any = self._platform.find_device()
        self._lagging: Any = LaggingDevice(0.005)
        self._kernel = FakeKernel()

    def names(self) -> dict[str, str]:
        return {"a fake device, in this process": "no GPU"}

    def row(self, name: str, value: str) -> None:
        print(f"{name:<58}{value:>18}  fake: not a GPU's figure", flush=True)

    def device(self) -> Device:
        return self._device  # type: ignore[no-any-return]

    def progress(self) -> Progress:
        return self._lagging  # type: ignore[no-any-return]

    def lasts(self, seconds: float) -> None:
        self._lagging.compute(seconds)

    def synchronize(self) -> None:
        done = self._lagging.record_mark()
        while not (self._device.idle and done.query()):
            time.sleep(2e-4)

    def pin(self, memory: torch.Tensor) -> Pin:
        return self._platform.pin(memory)  # type: ignore[no-any-return]

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def undigested(self) -> str:
        gpudigest._load_kernel = lambda: self._kernel
        return gpudigest.find_fault(torch.device(self.place))

    def beside(self, work: Callable[[], object]) -> None:
        work()

    def lacking(self) -> str:
        return ""

    def connect(self) -> Communicator:
        links = Links(((0,),), (0,))
        return self._platform.connect(self._device, 0, links, self._platform.create_unique_id())  # type: ignore[no-any-return]
