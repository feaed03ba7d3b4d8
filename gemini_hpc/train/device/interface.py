"""What the exchange of chunks needs of a device and of a communicator; CUDA and NCCL are one pair of them.

Nothing here waits on the host: what is called is put at the end of a stream's queue and returns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Broken(Exception):
    """The communicator cannot be used any more."""


class Event(Protocol):
    """A mark in a stream."""

    def query(self) -> bool:
        """Whether the stream has come to it. Never blocks."""

    def seconds_since(self, earlier: Any) -> float:
        """From another mark to this one; both have been reached."""


class Stream(Protocol):
    """A queue of work for the device, done in order; between streams there is no order but by `wait`."""

    @property
    def key(self) -> Hashable:
        """Equal for two objects that stand for one queue."""

    def record(self) -> Event:
        """A mark behind everything enqueued so far."""

    def wait(self, event: Event) -> None:
        """What is enqueued from now on begins after this mark."""

    def follow(self, work: Any) -> None:
        """What is enqueued from now on begins after a collective of the training, launched by this thread (a
        `dist.Work` on CUDA). Its tensors stay allocated until then."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between tensors of one size, on the device or in pinned host memory, in either direction."""

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Many such copies, each from the second of a pair into the first."""


class Device(Protocol):
    """One GPU of one rank."""

    def stream(self) -> Stream:
        """A new one."""

    def current(self) -> Stream:
        """The one on which the training enqueues now, in this thread."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Device memory, uint8."""

    def capturing(self) -> bool:
        """Whether the calling thread captures a CUDA graph: nothing may be enqueued, recorded or asked then."""

    def grouping(self) -> bool:
        """Whether the training has a bracket open that gathers operations: ours would become part of it, and be
        launched when it ends."""


class Message(NamedTuple):
    """Bytes to or from a rank."""

    peer: int
    bytes: torch.Tensor


class Communicator(Protocol):
    """Point-to-point messages between the ranks of the set, outside of torch's process groups."""

    def exchange(self, stream: Stream, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Enqueue all of these as one operation, which ends when all of them have. Raises Broken."""

    def error(self) -> str:
        """What went wrong on the device or at another rank, '' if nothing: an operation that ended after that has
        brought nothing. Never blocks; from any thread."""

    def abort(self) -> None:
        """End what is enqueued and running, from any thread, also while another thread is inside `exchange`: streams
        go on, what was to be received is undefined. Every later `exchange` raises Broken. May be called again."""
