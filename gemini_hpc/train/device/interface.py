"""Interfaces of devices and communicators for the exchange of chunks; CUDA and NCCL are one pair.

No call here waits on the host. Each call puts its work at the end of a stream's queue and returns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Broken(Exception):
    """The communicator can no longer be used."""


class Event(Protocol):
    """A mark in a stream."""

    def query(self) -> bool:
        """Return whether the stream has reached the mark. Never block."""

    def count_seconds_since(self, earlier: Any) -> float:
        """Return the seconds from another mark to this one; both have been reached."""


class Stream(Protocol):
    """A queue of work for the device, executed in order.

    Work on different streams has no order except by `wait`.
    """

    @property
    def key(self) -> Hashable:
        """Return a key that is equal for two objects that stand for the same queue."""

    def record(self) -> Event:
        """Record a mark behind everything enqueued so far."""

    def wait(self, event: Event) -> None:
        """Make work enqueued from now on begin after this mark."""

    def wait_work(self, work: Any) -> None:
        """Make work enqueued from now on begin after a collective of the training.

        The collective's tensors stay allocated until then.

        Args:
            work: A collective that this thread has launched (a `dist.Work` on CUDA).
        """

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between tensors of the same size, on the device or in pinned host memory, in either direction."""

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy from the second tensor of each pair into the first, as `copy` does."""


class Device(Protocol):
    """A GPU of a rank."""

    def create_stream(self) -> Stream:
        """Create a stream."""

    def get_current_stream(self) -> Stream:
        """Return the stream on which the training enqueues now, in this thread."""

    def allocate_buffer(self, size_bytes: int) -> torch.Tensor:
        """Allocate device memory of `size_bytes` bytes, as uint8."""

    def is_capturing(self) -> bool:
        """Return whether the calling thread captures a CUDA graph.

        During a capture nothing may be enqueued, recorded or queried.
        """

    def is_grouping(self) -> bool:
        """Return whether the training has an open bracket that gathers operations.

        Our operations would become part of the bracket and be launched when it ends.
        """


class Message(NamedTuple):
    """Bytes to or from a rank."""

    peer: int
    bytes: torch.Tensor


class Communicator(Protocol):
    """Point-to-point messages between the ranks of a training, outside of torch's process groups."""

    def exchange(self, stream: Stream, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Enqueue all messages as one operation, which ends when all of them have ended.

        Raises:
            Broken: The communicator can no longer be used.
        """

    def poll_error(self) -> str:
        """Return the error on the device or at another rank; '' without one.

        An operation that ended after an error has transferred nothing. The call never blocks and may come from any
        thread.
        """

    def abort(self) -> None:
        """End the enqueued and running operations.

        The streams go on; the content of receive buffers is undefined. Every later `exchange` raises Broken. The call
        may be repeated and may come from any thread, also while another thread is inside `exchange`.
        """
