"""The machine for copies from GPU to GPU: CUDA with NCCL. Tests use another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from gemini_hpc.train.device import cuda
from gemini_hpc.train.device.interface import Communicator, Device, Message
from gemini_hpc.train.device.pins import Pin
from gemini_hpc.train.nccl.communicator import NcclCommunicator
from gemini_hpc.train.nccl.exchange import Links
from gemini_hpc.train.nccl.library import Library, NcclUnavailable

CONNECT_S = 60.0  # limit for the communicator's creation, and for its first messages; both are slow on many nodes


class Platform:
    """The current CUDA device with NCCL."""

    backend = "nccl"  # torch's name for process groups whose works `Stream.wait_work` takes

    def __init__(self) -> None:
        self._library: Library | None = None
        self._index: int | None = None

    def explain_refusal(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the reason why these tensors cannot be copied over NCCL; '' if there is none."""
        if not torch.cuda.is_available():
            return "there is no CUDA device here"
        devices = {tensor.device for tensor in tensors}
        self._index = torch.cuda.current_device()
        current_device = torch.device("cuda", self._index)
        if devices - {current_device}:
            others = ", ".join(sorted(map(str, devices - {current_device})))
            return f"training state is on {others}; all of it must be on the current device, {current_device}"
        if "nccl" not in str(dist.get_backend_config()):
            return "the training's default process group is not of NCCL"
        self._library, missing = load_library()
        return missing or check_environment()

    def create_unique_id(self) -> bytes:
        """Return an NCCL id for `connect` on all ranks; called on one rank.

        Raises:
            Broken: If the id cannot be made.
        """
        assert self._library is not None
        return self._library.create_unique_id()

    def find_device(self) -> Device:
        """Return the current CUDA device."""
        return cuda.CudaDevice()

    def connect(self, device: Device, rank: int, links: Links, unique_id: bytes) -> Communicator:
        """Return a communicator over all ranks, after a first message along every link.

        Collective, while no rank's device is inside a collective.

        Raises:
            Broken: If the communicator cannot be made.
        """
        assert self._library is not None
        torch.cuda.synchronize()
        made = NcclCommunicator(self._library, rank, len(links.sizes), cuda.get_handle)
        try:
            made.connect(unique_id, CONNECT_S)
            made.warm(device.create_stream(), *build_first_messages(device, rank, links), CONNECT_S)
            torch.cuda.synchronize()
        except BaseException:
            with suppress(Exception):
                made.abort()
            raise
        return made

    def pin(self, memory: torch.Tensor) -> Pin:
        """Pin replica memory, which is mapped and populated, for the current CUDA device.

        Raises:
            RuntimeError: If the memory cannot be pinned.
        """
        return cuda.Pinned(memory, self._index)


def check_environment(environ: Mapping[str, str] | None = None) -> str:
    """Return the reason why this process's environment forbids NCCL copies; '' if there is none."""
    given = os.environ if environ is None else environ
    if given.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue: a copy that waits for another rank would "
            "hold up the training's kernels"
        )
    if given.get("CUDA_LAUNCH_BLOCKING", "").strip() not in ("", "0"):
        return "CUDA_LAUNCH_BLOCKING is set: nothing can be enqueued without waiting for it"
    return ""


def load_library(paths: list[str] | None = None) -> tuple[Library | None, str]:
    """Return NCCL, or the reason why it is unavailable."""
    try:
        return Library(paths), ""
    except (NcclUnavailable, OSError) as error:
        return None, str(error)


def build_first_messages(device: Device, rank: int, links: Links) -> tuple[list[Message], list[Message]]:
    """Return the messages to send and to receive that use every link of this rank once."""
    sends = [Message(peer, device.allocate_buffer(1)) for peer in links.targets[rank]]
    replicas = range(len(links.targets[rank]))
    return sends, [Message(peer, device.allocate_buffer(1)) for q in replicas for peer in links.list_sources(rank, q)]


# Called once for each checkpointer that uses NCCL.
make: Callable[[], Platform] = Platform
