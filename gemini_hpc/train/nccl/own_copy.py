"""The copy into the own slot, in chunks, while the training's collectives run (GEMINI paper, section 5.3, end).

While the network is busy no chunk of another rank arrives, so the copy has the path to host memory for itself. Each
rank plans its own copy, without the others. All copies to the host go through one stream, so no two run at the same
time, however good the plan.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gemini_hpc.core.chunks import cut_chunks
from gemini_hpc.core.spans import Profile
from gemini_hpc.train.device.interface import Broken, Device, Event, Stream
from gemini_hpc.train.nccl.source import Tensors


class Busy(NamedTuple):
    """A time before the gate in which the network is busy.

    Attributes:
        after: Number (from 0) of the collective with whose launch the time begins.
        length_s: Length in seconds.
    """

    after: int
    length_s: float


class Piecework(NamedTuple):
    """A chunk of the own copy.

    Attributes:
        after: Number of the collective with whose launch the chunk is copied; -1: copied at the gate.
        offset: First byte.
        size: Size in bytes.
    """

    after: int
    offset: int
    size: int


def list_busy_times(profile: Profile) -> list[Busy]:
    """Return the times between a profile's idle spans, up to the gate."""
    spans = [span for span in profile.spans if span.before_gate]
    found = []
    end, after = 0.0, 0
    for span in spans:
        if span.after > after and span.start_s > end:
            found.append(Busy(after, span.start_s - end))
        end, after = span.end_s, span.after
    if profile.gate_s > end and after < profile.ops:
        found.append(Busy(after, profile.gate_s - end))
    return found


def plan_copy(
    profile: Profile, total_bytes: int, chunk_bytes: int, bytes_per_s: float, mu: float
) -> tuple[Piecework, ...]:
    """Return the chunks of the own copy.

    Each busy time is filled up to a share mu, in order. The rest goes at the gate, which it holds up.

    Args:
        profile: This rank's profile.
        total_bytes: Bytes to copy.
        chunk_bytes: Largest chunk in bytes.
        bytes_per_s: Rate of a copy to host memory.
        mu: Share of each busy time that is used.

    Raises:
        ValueError: If the rate is not above 0, or as `cut_chunks` does.
    """
    if not bytes_per_s > 0:
        raise ValueError(f"copies to host memory at {bytes_per_s} bytes per second: more than 0 is wanted")
    placed: list[Piecework] = []
    at = 0
    for after, length_s in list_busy_times(profile):
        room = min(total_bytes - at, int(mu * length_s * bytes_per_s))
        placed += [Piecework(after, at + offset, size) for offset, size in cut_chunks(room, chunk_bytes)]
        at += room
    return (
        *placed,
        *(Piecework(-1, at + offset, size) for offset, size in cut_chunks(total_bytes - at, chunk_bytes)),
    )


class OwnSlot:
    """The shard's bytes in the own slot (pinned), the source of chunks after the optimizer has changed the tensors.

    The bytes are complete at the event `filled`, which is set from the gate on.
    """

    def __init__(self, area: torch.Tensor) -> None:
        self._area = area
        self.filled: Event | None = None

    def put(self, stream: Stream, into: torch.Tensor, offset: int) -> None:
        """Enqueue a copy into a device buffer, see `exchange.Save`.

        Raises:
            Broken: If called before the gate.
        """
        if self.filled is None:
            raise Broken("the own slot is read before its copy is enqueued")
        stream.wait(self.filled)
        stream.copy(into, self._area[offset : offset + into.numel()])


@dataclass
class _Version:
    tensors: Tensors
    area: torch.Tensor
    work: tuple[Piecework, ...]
    slot: OwnSlot
    done: int = 0


class OwnCopy:
    """The copier of versions into the own slot.

    It enqueues on `copies`, the stream of all copies to the host. Only the launching thread calls it, as it does
    `Exchange`.
    """

    def __init__(self, device: Device, copies: Stream) -> None:
        self._device, self._copies = device, copies
        self._version: _Version | None = None

    def begin_copy(self, tensors: Tensors, area: torch.Tensor, work: tuple[Piecework, ...]) -> OwnSlot:
        """Begin to copy a version into `area`, the tensor area of the own slot.

        Called in the training's step(), before `Exchange.step`.
        """
        self._copies.wait(self._device.get_current_stream().record())
        tensors.enqueue_staging(self._copies)
        self._version = _Version(tensors, area, work, OwnSlot(area))
        return self._version.slot

    def on_launching(self, number: int) -> None:
        """Enqueue the chunks that are due before collective `number` of the iteration is launched.

        When the device reaches this collective, the network is busy.
        """
        version = self._version
        if version is not None and not self._device.is_capturing():
            later = [w.after if w.after >= 0 else number + 1 for w in version.work]
            self._enqueue_until(version, bisect_right(later, number))

    def enqueue_rest(self) -> None:
        """Enqueue the rest, before the optimizer and before `Exchange.prepare_for_gate`.

        Work that the current stream enqueues from now on waits for the whole copy, on the device.
        """
        if self._version is None or self._device.is_capturing():
            return
        version, self._version = self._version, None
        self._enqueue_until(version, len(version.work))
        version.slot.filled = self._copies.record()
        self._device.get_current_stream().wait(version.slot.filled)

    def _enqueue_until(self, version: _Version, until: int) -> None:
        if version.done >= until:
            return
        self._copies.wait(self._device.get_current_stream().record())
        for _, offset, size in version.work[version.done : until]:
            for at, part in version.tensors.iterate_parts(offset, offset + size):
                self._copies.copy(version.area[at : at + part.numel()], part)
        version.done = until
