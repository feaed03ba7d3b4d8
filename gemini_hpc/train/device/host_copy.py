"""Copies of a device's tensors into replica memory, on a stream of our own.

The copies run beside all that the training computes and sends. They go in pieces, so that other copies between host
and device get their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from gemini_hpc import clock
from gemini_hpc.train.device.cuda import CudaDevice
from gemini_hpc.train.device.interface import Device, Event

PIECE_BYTES = 8 << 20  # 0.3 ms over PCIe 4
_LOOK_S = 0.0005  # between two polls of a copy


class HostCopies:
    """The copies from one device into host memory."""

    def __init__(self, device: Device, holds: Callable[[torch.Tensor], bool]) -> None:
        """Create a stream for the copies.

        Args:
            device: The device to copy from.
            holds: Returns whether a tensor is on that device.
        """
        self._device, self._stream = device, device.create_stream()
        self.holds = holds

    def record_mark(self) -> Event:
        """Record an event behind all that this thread has launched, at step()."""
        return self._device.get_current_stream().record()

    def bring(self, ready: Event, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Copy from the second of each pair into the first, once the device has reached `ready`.

        The call returns when all copies are complete. It polls, because waiting for a device occupies a processor.

        Args:
            ready: Event that the device must reach before the copies begin.
            pairs: (target, source) tensors. Targets are on the host and contiguous.

        Returns:
            The seconds from the time the device reached `ready` to the end of the copies.
        """
        self._stream.wait(ready)
        begun = self._stream.record()
        self._stream.copy_all(piece for into, source in pairs for piece in _cut_pieces(into, source))
        done = self._stream.record()
        while not done.query():
            clock.sleep(_LOOK_S)
        return done.count_seconds_since(begun)


def _cut_pieces(into: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if source.nbytes <= PIECE_BYTES or not source.is_contiguous():
        if source.numel():
            yield into, source
        return
    target_bytes, source_bytes = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (into, source))
    for at in range(0, source_bytes.numel(), PIECE_BYTES):
        yield target_bytes[at : at + PIECE_BYTES], source_bytes[at : at + PIECE_BYTES]


def _create_copies(device: torch.device | None) -> HostCopies | None:
    return HostCopies(CudaDevice(device.index), lambda t: t.device == device) if device is not None else None


# Makes the copies of a training with state on this device; None where the state is on no device. Tests replace it.
create_copies: Callable[[torch.device | None], HostCopies | None] = _create_copies
