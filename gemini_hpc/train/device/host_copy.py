"""Copies of a device's tensors into replica memory, on a stream of our own: beside all that the training computes and
sends, in pieces, so that other copies between host and device find their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from gemini_hpc import clock
from gemini_hpc.train.device.cuda import CudaDevice
from gemini_hpc.train.device.interface import Device, Event

PIECE_BYTES = 8 << 20  # 0.3 ms over PCIe 4
_LOOK_S = 0.0005


class HostCopies:
    """From one device."""

    def __init__(self, device: Device, holds: Callable[[torch.Tensor], bool]) -> None:
        """holds: whether a tensor is there."""
        self._device, self._stream = device, device.stream()
        self.holds = holds

    def mark(self) -> Event:
        """Behind all that this thread has launched: at step()."""
        return self._device.current().record()

    def bring(self, ready: Event, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Copy from the second of each pair into the first, which is on the host and contiguous, when the device has
        come to `ready`. Returns when all is there, and how long that took from then on, in seconds: by looking now
        and then, since waiting for a device takes a processor."""
        self._stream.wait(ready)
        begun = self._stream.record()
        self._stream.copy_all(piece for into, source in pairs for piece in _pieces(into, source))
        done = self._stream.record()
        while not done.query():
            clock.sleep(_LOOK_S)
        return done.seconds_since(begun)


def _pieces(into: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if source.nbytes <= PIECE_BYTES or not source.is_contiguous():
        if source.numel():
            yield into, source
        return
    to, of = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (into, source))
    for at in range(0, of.numel(), PIECE_BYTES):
        yield to[at : at + PIECE_BYTES], of[at : at + PIECE_BYTES]


def _of_training(device: torch.device | None) -> HostCopies | None:
    return HostCopies(CudaDevice(device.index), lambda t: t.device == device) if device is not None else None


# Those of a training with state on this device; None where it has none on any. Tests bring others.
of_training: Callable[[torch.device | None], HostCopies | None] = _of_training
