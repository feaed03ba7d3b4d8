"""What the checkpointer needs of a machine for copies from GPU to GPU. CUDA with NCCL is one; tests bring another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
import torch.distributed as dist

from gemini_hpc.train.device import cuda
from gemini_hpc.train.device.interface import Communicator, Device, Message
from gemini_hpc.train.device.pins import Pin
from gemini_hpc.train.nccl import capability_check
from gemini_hpc.train.nccl.communicator import NcclCommunicator
from gemini_hpc.train.nccl.exchange import Links
from gemini_hpc.train.nccl.library import Library

CONNECT_S = 60.0  # for each of making the communicator and its first messages: slow on many nodes


class Platform(Protocol):
    """Of one rank. backend: torch's name for it in process groups whose works `Stream.follow` takes."""

    backend: str

    def refuses(self, tensors: Sequence[torch.Tensor]) -> str:
        """Why copies of these tensors cannot go this way here; '' if they can."""

    def unique_id(self) -> bytes:
        """On one rank, for `connect` on all. Raises Broken."""

    def device(self) -> Device:
        """The GPU of this rank."""

    def connect(self, device: Device, rank: int, links: Links, unique_id: bytes) -> Communicator:
        """Collective, while no rank's device is inside a collective: a communicator over all ranks of which every
        link has been used. Raises Broken."""

    def pin(self, memory: torch.Tensor) -> Pin:
        """Replica memory, mapped and populated. Raises RuntimeError."""


class CudaPlatform:
    """The current CUDA device and NCCL."""

    backend = "nccl"

    def __init__(self) -> None:
        self._library: Library | None = None
        self._index: int | None = None

    def refuses(self, tensors: Sequence[torch.Tensor]) -> str:
        if not torch.cuda.is_available():
            return "there is no CUDA device here"
        devices = {tensor.device for tensor in tensors}
        self._index = torch.cuda.current_device()
        here = torch.device("cuda", self._index)
        if devices - {here}:
            others = ", ".join(sorted(map(str, devices - {here})))
            return f"training state is on {others}; all of it must be on the current device, {here}"
        if "nccl" not in str(dist.get_backend_config()):
            return "the training's default process group is not of NCCL"
        self._library, missing = capability_check.library()
        return missing or capability_check.environment()

    def unique_id(self) -> bytes:
        assert self._library is not None
        return self._library.unique_id()

    def device(self) -> Device:
        return cuda.CudaDevice()

    def connect(self, device: Device, rank: int, links: Links, unique_id: bytes) -> Communicator:
        assert self._library is not None
        torch.cuda.synchronize()
        made = NcclCommunicator(self._library, rank, len(links.sizes), cuda.handle)
        try:
            made.connect(unique_id, CONNECT_S)
            made.warm(device.stream(), *first_messages(device, rank, links), CONNECT_S)
            torch.cuda.synchronize()
        except BaseException:
            with suppress(Exception):
                made.abort()
            raise
        return made

    def pin(self, memory: torch.Tensor) -> Pin:
        return cuda.Pinned(memory, self._index)


def first_messages(device: Device, rank: int, links: Links) -> tuple[list[Message], list[Message]]:
    """What to send and to receive, so that every link of this rank is used once."""
    sends = [Message(peer, device.buffer(1)) for peer in links.targets[rank]]
    replicas = range(len(links.targets[rank]))
    return sends, [Message(peer, device.buffer(1)) for q in replicas for peer in links.sources(rank, q)]


# Made once for each checkpointer that wants it.
make: Callable[[], Platform] = CudaPlatform
