"""The copy into the own slot, in chunks, while the training's collectives run (GEMINI paper, section 5.3, end).

Then the network is busy and no chunk of another rank arrives, so the copy has the way to host memory for itself. It
is not a matter between ranks: each plans its own. All copies to the host go through one stream, so none runs beside
another, whatever the plan was worth.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gemini_hpc.core.chunks import cut
from gemini_hpc.core.spans import Profile
from gemini_hpc.train.device.interface import Broken, Device, Event, Stream
from gemini_hpc.train.nccl.source import Tensors


class Busy(NamedTuple):
    """The network is busy from the launch of collective number `after` (from 0) for `length_s`, before the gate."""

    after: int
    length_s: float


class Piecework(NamedTuple):
    """Bytes offset..offset+size, together with the launch of collective number `after`; -1: what is left goes at the
    gate."""

    after: int
    offset: int
    size: int


def busy(profile: Profile) -> list[Busy]:
    """What lies between a profile's idle spans, up to the gate."""
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


def plan(
    profile: Profile, total_bytes: int, chunk_bytes: int, bytes_per_s: float, mu: float
) -> tuple[Piecework, ...]:
    """As much as fits into a share mu of each busy time, in order; what does not fit goes at the gate, which it holds
    up. bytes_per_s: of a copy to host memory. Raises ValueError for a rate that is not above 0, and as `cut`."""
    if not bytes_per_s > 0:
        raise ValueError(f"copies to host memory at {bytes_per_s} bytes per second: more than 0 is wanted")
    placed: list[Piecework] = []
    at = 0
    for after, length_s in busy(profile):
        room = min(total_bytes - at, int(mu * length_s * bytes_per_s))
        placed += [Piecework(after, at + offset, size) for offset, size in cut(room, chunk_bytes)]
        at += room
    return (*placed, *(Piecework(-1, at + offset, size) for offset, size in cut(total_bytes - at, chunk_bytes)))


class OwnSlot:
    """The shard's bytes in the own slot (pinned), complete at the mark `filled`, which is known from the gate on: for
    what is sent after the optimizer has changed the tensors."""

    def __init__(self, area: torch.Tensor) -> None:
        self._area = area
        self.filled: Event | None = None

    def put(self, stream: Stream, into: torch.Tensor, offset: int) -> None:
        """See `exchange.Source`. Raises Broken before the gate."""
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
    """Enqueues the chunks on `copies`, the stream of all copies to the host. Calls come from the launching thread,
    beside those of `Exchange`."""

    def __init__(self, device: Device, copies: Stream) -> None:
        self._device, self._copies = device, copies
        self._version: _Version | None = None

    def begin(self, tensors: Tensors, area: torch.Tensor, work: tuple[Piecework, ...]) -> OwnSlot:
        """At step(), before `Exchange.step`: a version comes into `area`, the tensor area of the own slot."""
        self._copies.wait(self._device.current().record())
        tensors.stage(self._copies)
        self._version = _Version(tensors, area, work, OwnSlot(area))
        return self._version.slot

    def launching(self, number: int) -> None:
        """Before collective `number` of the iteration is launched: when the device comes to it, the network is
        busy."""
        version = self._version
        if version is not None and not self._device.capturing():
            later = [w.after if w.after >= 0 else number + 1 for w in version.work]
            self._until(version, bisect_right(later, number))

    def gate(self) -> None:
        """Before the optimizer, and before `Exchange.gate`: the rest. What this stream enqueues from now on waits for
        all of it, on the device."""
        if self._version is None or self._device.capturing():
            return
        version, self._version = self._version, None
        self._until(version, len(version.work))
        version.slot.filled = self._copies.record()
        self._device.current().wait(version.slot.filled)

    def _until(self, version: _Version, until: int) -> None:
        if version.done >= until:
            return
        self._copies.wait(self._device.current().record())
        for _, offset, size in version.work[version.done : until]:
            for at, part in version.tensors.within(offset, offset + size):
                self._copies.copy(version.area[at : at + part.numel()], part)
        version.done = until
