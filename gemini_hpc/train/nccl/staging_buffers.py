"""Sub-buffers in device memory through which chunks travel (GEMINI paper, section 5.2, Figure 5d)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini_hpc.train.device.interface import Device, Event, Stream


@dataclass
class SubBuffer:
    """A sub-buffer.

    Attributes:
        bytes: Its memory.
        free: Event behind its last use; set by the code that takes the bytes out.
    """

    bytes: torch.Tensor
    free: Event | None = None


class SubBufferRing:
    """A ring of p sub-buffers. The host never waits for one: the stream that fills it does."""

    def __init__(self, device: Device, p: int, part_bytes: int) -> None:
        if p < 1 or part_bytes < 1:
            raise ValueError(f"{p} parts of {part_bytes} bytes: at least one of one byte is wanted")
        self.part_bytes = part_bytes
        self._parts = [SubBuffer(device.allocate_buffer(part_bytes)) for _ in range(p)]
        self._next = 0

    def pick_next(self, stream: Stream) -> SubBuffer:
        """Return the next sub-buffer. Work enqueued on `stream` from now on begins after its last use."""
        part = self._parts[self._next]
        self._next = (self._next + 1) % len(self._parts)
        if part.free is not None:
            stream.wait(part.free)
        return part
