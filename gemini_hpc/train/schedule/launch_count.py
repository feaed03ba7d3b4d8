"""Count of the operations that a training has launched on this rank since its first `step()` (`core.moments`).

The count includes launches by the thread that calls `step()` and by threads that are not Python's, such as
autograd's. A program's other threads (a saver, a loader) launch at any time between two steps, so their launches are
not counted. A message that such a thread sends or receives makes the moment unknown, because the peer may count the
message. A receive from any source does so too, because its sender is unknown at the launch.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from gemini_hpc.core.moments import MODULUS, UNKNOWN, Moment, weigh_collective, weigh_message
from gemini_hpc.train.schedule.dispatch_hooks import Signature

_SEND, _ANY_SOURCE = "send", "recv_any_source_"
_REMEMBERED = 9  # iterations


class GroupWeights:
    """The weights of the launches of one process group on this rank.

    Args:
        ranks: World ranks of the group, in its order; empty if unknown.
        rank: This rank's number in the world.
        savers: Ranks that save versions of the training; None: all.
    """

    def __init__(self, ranks: Sequence[int], rank: int, savers: frozenset[int] | None) -> None:
        self._ranks, self._rank, self._savers = ranks, rank, savers
        self.collective = weigh_collective([r for r in ranks if savers is None or r in savers], rank)
        self._messages: dict[tuple[str, int], int] = {}

    def compute_message_weight(self, name: str, peer: int) -> int:
        """Return the weight of a send to a rank of the group, or of a receive from it.

        Args:
            name: Name of the operator.
            peer: The peer's rank in the group.
        """
        found = self._messages.get((name, peer))
        if found is None:
            other = self._ranks[peer] if 0 <= peer < len(self._ranks) else self._rank
            if other == self._rank or (self._savers is not None and other not in self._savers):
                found = 0
            elif name == _SEND:
                found = weigh_message(self._rank, other)
            else:
                found = -weigh_message(other, self._rank)
            self._messages[name, peer] = found
        return found


class LaunchCount:
    """The count of one rank's launches; created in its first `step()`, in the thread that calls it."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._lock = threading.Lock()
        self._sum = self._operations = self._before = 0
        self._known = True
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)

    def add(self, weights: GroupWeights, signature: Signature, args: tuple[Any, ...]) -> None:
        """Count a launch, in the thread that launches it."""
        is_message = signature.peer_at is not None or signature.name == _ANY_SOURCE
        thread = threading.current_thread()
        if thread is not self._thread and not isinstance(thread, threading._DummyThread):
            self._known = self._known and not is_message
            return
        if signature.name == _ANY_SOURCE:
            self._known = False
            return
        if signature.peer_at is not None:
            weight = weights.compute_message_weight(signature.name, args[signature.peer_at])
        else:
            weight = weights.collective
        with self._lock:
            self._sum += weight
            self._operations += 1

    def mark_unknown(self) -> None:
        """Record that a launch was not counted; the moment is unknown from now on."""
        self._known = False

    def read(self) -> Moment:
        """Return the moment at a `step()`; called in the thread that calls `step()`."""
        if threading.current_thread() is not self._thread:
            self._known = False
        with self._lock:
            length, self._before = self._operations - self._before, self._operations
            if length:
                self._lengths.append(length)
            usual = statistics.median_low(self._lengths) if self._lengths else 0
            return Moment(self._sum % MODULUS if self._known else UNKNOWN, self._operations, usual)
