"""The chunks of one rank in flight: sent, but not yet acknowledged."""

from __future__ import annotations

import queue
import threading

from gemini_hpc import clock
from gemini_hpc.train.nccl.messages import Pending
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.transport.base import LinkBroken


class Outstanding:
    """The chunks in flight of one rank, at most p at a time.

    A separate thread waits for the acknowledgements. Their times are therefore right even while the sender waits for
    its turn.
    """

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._queue: queue.SimpleQueue[tuple[Pending, int, int, float] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._count = 0
        self._broken: LinkBroken | None = None
        self._backlog_bytes = 0
        self._thread = threading.Thread(target=self._run, name="gemini-acknowledged", daemon=True)
        self._thread.start()

    def add(self, pending: Pending, replica: int, size: int) -> None:
        """Record that a chunk of a replica has been sent."""
        now = clock.monotonic()
        with self._changed:
            self._count += 1
            self._backlog_bytes += size
            self._pacer.record_send(now)
        self._queue.put((pending, replica, size, now))

    def count_backlog(self) -> int:
        """Return the bytes in flight."""
        return self._backlog_bytes

    def wait_for_room(self, p: int) -> None:
        """Wait until fewer than p chunks are in flight.

        Raises:
            LinkBroken: If a chunk in flight is lost; raised once no chunk is in flight any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._count < p or self._broken is not None)
            broken = self._broken
        if broken is not None:
            self.drain()
            raise broken

    def drain(self) -> None:
        """Wait until no chunk is in flight, and clear the recorded error."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0)
            self._broken = None

    def stop(self) -> None:
        """End the thread after the chunks in flight; no more will be sent."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end for `timeout_s` seconds. Return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, replica, size, sent_at = item
            broken: LinkBroken | None = None
            try:
                pending.wait()
            except LinkBroken as error:
                broken = error
            except Exception as error:  # any error of a transport means that the chunk has not arrived
                broken = LinkBroken(f"{type(error).__name__}: {error}")
            with self._changed:
                self._count -= 1
                self._backlog_bytes -= size
                if broken is None:
                    self._pacer.record_ack(replica, size, sent_at)
                else:
                    self._pacer.meter.record_loss()
                self._broken = self._broken or broken
                self._changed.notify_all()
