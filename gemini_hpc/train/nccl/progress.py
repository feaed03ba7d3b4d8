"""Progress of the enqueued operations, polled by a thread that never waits for the device.

The training's launching threads wait for our operations on the device only. An operation hangs if the other end is
dead or did not launch it. The polling thread then aborts the communicator from outside: streams go on, and the copies
take another way.

It aborts only where the training itself has arrived where it waits for our operation. An operation that merely waits
for its turn, or for a slow rank, harms nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from gemini_hpc import clock
from gemini_hpc.train.device.interface import Communicator, Event

PATIENCE_S = 1.5  # longest wait of the training for an operation of ours that does not end
DRAIN_S = 10.0  # after an abort: our operations end at once, but the training's operations before them may take long
_LOOK_S = 0.001  # short beside the operations, of milliseconds


class Arrival(NamedTuple):
    """The received bytes of a rank's shard.

    Attributes:
        rank: The rank whose shard it is.
        size: Number of bytes.
        copied: Event behind their copy into the slot; None: the bytes are dropped.
    """

    rank: int
    size: int
    copied: Event | None


@dataclass
class Operation:
    """An enqueued operation.

    Attributes:
        version: The operation's version.
        size: Bytes of the chunk.
        left: Number of operations of the version that come after it.
        ready: Event before the operation.
        done: Event behind the operation.
        arrivals: The received bytes.
        waited: Event where the training begins to wait for the operation.
    """

    version: int
    size: int
    left: int
    ready: Event
    done: Event
    arrivals: list[Arrival] = field(default_factory=list)
    waited: Event | None = None


class ResultListener(Protocol):
    """The listener to the operations' results, called by the polling thread. Must not block."""

    def on_measured(self, size: int, seconds: float) -> None:
        """Process the duration of a message of `size` bytes in seconds, including its wait for the other end."""

    def on_sent(self, version: int) -> None:
        """Process that all of this rank's bytes of a version have left."""

    def on_landed(self, version: int, rank: int) -> None:
        """Process that all bytes of that rank's shard are in the slot."""

    def on_failed(self, version: int, drained: bool) -> None:
        """Process that the part of this version that has not arrived never will.

        If not `drained`, the device may still write into its slots, so they must not be filled again.
        """


class Progress:
    """The operations of one communicator, and the thread that polls them."""

    def __init__(
        self,
        communicator: Communicator,
        sizes: Sequence[int],
        listener: ResultListener,
        say: Callable[[str], None],
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """Create a record without operations; `start` starts the thread.

        Args:
            communicator: The communicator.
            sizes: Bytes of each rank's shard.
            listener: Listener to the results.
            say: Prints a line for the user.
            patience_s: Longest wait of the training for an operation of ours, in seconds.
            clock: Returns the time in seconds.
        """
        self._communicator, self._sizes, self._listener, self._say = communicator, tuple(sizes), listener, say
        self._patience_s, self._clock = patience_s, clock
        self.problem = ""
        self._running: deque[Operation] = deque()
        self._copying: deque[tuple[Operation, Arrival]] = deque()
        self._got: dict[tuple[int, int], int] = {}
        self._open: set[int] = set()  # versions in progress
        self._waiting_since: float | None = None
        self._aborted_at: float | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- from the launching thread ---------------------------------------------------------------------

    def record_operation(self, operation: Operation) -> None:
        """Record an enqueued operation, in the order of the device."""
        self._running.append(operation)

    def fail(self, reason: str) -> None:
        """Enqueue nothing more; running operations are aborted at the next poll. Thread-safe."""
        self.problem = self.problem or reason

    # ---- the thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which polls every millisecond while operations are in progress."""
        self._thread = threading.Thread(target=self._run, name="gemini-nccl", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Wait for all operations and end the thread. Return whether it has ended and nothing was aborted.

        Operations that are still in progress after `timeout_s` seconds are aborted.
        """
        deadline = self._clock() + timeout_s
        while self.busy and self._clock() < deadline and not self.problem:
            clock.sleep(_LOOK_S)
        if self.busy:
            self.fail("the training ended before its last copies")
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout_s + 1.0)
        return not self.problem and (self._thread is None or not self._thread.is_alive())

    @property
    def busy(self) -> bool:
        """Return whether an operation or a version is in progress."""
        return bool(self._running or self._copying or self._open)

    def _run(self) -> None:
        while self.busy or not self._ending.is_set():
            clock.sleep(_LOOK_S if self.busy else 10 * _LOOK_S)
            try:
                self.poll_operations()
            except Exception as error:  # our own failure must not reach the training
                self.fail(f"{type(error).__name__}: {error}")
                self._communicator.abort()
                for version in self._list_versions():
                    self._listener.on_failed(version, False)
                return

    def poll_operations(self) -> None:
        """Poll all operations once and report to the listener."""
        now = self._clock()
        done = [operation for operation in tuple(self._running) if operation.done.query()]
        if self._aborted_at is None and (
            error := self._communicator.poll_error()
        ):  # after `done`, which may mean broken
            self.fail(error)
            return self._abort(now)
        for operation in done:
            self._running.popleft()
            self._process_finished(operation)
            self._waiting_since = None
        while self._copying and self._finish_arrival(*self._copying[0]):
            self._copying.popleft()
            self._waiting_since = None
        if self._aborted_at is not None:
            return self._drain(now)
        if self.problem or self._is_stuck(now):
            self.fail(f"nothing has arrived for {self._patience_s:g} s while the training waited for it")
            self._abort(now)
        return None

    def _abort(self, now: float) -> None:
        self._aborted_at = now
        self._communicator.abort()
        self._say(f"copies over NCCL end here, training goes on: {self.problem}")

    def _process_finished(self, operation: Operation) -> None:
        version = operation.version
        self._open.add(version)
        for arrival in operation.arrivals:
            self._copying.append((operation, arrival))
        if self._aborted_at is None:
            if operation.arrivals:
                self._listener.on_measured(operation.size, operation.done.count_seconds_since(operation.ready))
            if operation.left == 0:
                self._open.discard(version)
                self._listener.on_sent(version)

    def _finish_arrival(self, operation: Operation, arrival: Arrival) -> bool:
        if arrival.copied is None:
            return True
        if not arrival.copied.query():
            return False
        key = operation.version, arrival.rank
        self._got[key] = self._got.get(key, 0) + arrival.size
        if self._got[key] == self._sizes[arrival.rank]:
            del self._got[key]
            if self._aborted_at is None:
                self._listener.on_landed(*key)
        return True

    def _is_stuck(self, now: float) -> bool:
        """Return whether the training has waited too long for an operation of ours.

        All running operations count: the training may wait for a later one than the one that hangs.
        """
        if not any(o.waited is not None and o.waited.query() for o in tuple(self._running)):
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since > self._patience_s

    def _drain(self, now: float) -> None:
        """Finish after an abort: the slots are free once the device has passed our last operation."""
        assert self._aborted_at is not None
        drained = not self._running and not self._copying
        if not drained and now - self._aborted_at <= DRAIN_S:
            return
        versions = self._list_versions()
        self._running.clear()
        self._copying.clear()
        self._open.clear()
        for version in versions:
            self._listener.on_failed(version, drained)

    def _list_versions(self) -> list[int]:
        """Return the versions in progress."""
        copying = (operation for operation, _ in self._copying)
        return sorted({*self._open, *(operation.version for operation in (*self._running, *copying))})
