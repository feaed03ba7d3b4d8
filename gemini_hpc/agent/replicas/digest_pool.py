"""The threads of an agent that hash replica memory.

All threads read one slot at once, in pieces (`core.digest`). More urgent readings go first. The threads run at a low
priority, so that the training gets the cores it needs. The number of slots bounds the queue: a caller has at most one
reading of a slot in progress. A cancelled reading ends with the current piece.
"""

from __future__ import annotations

import asyncio
import enum
import os
import threading
import time
from collections import deque
from concurrent.futures import Future

import xxhash

from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.core.digest import Pieces
from gemini_hpc.node import priority

LEAST_THREADS, MOST_THREADS, CORES_A_THREAD = 2, 16, 4
_BATCH = 4  # pieces that a thread takes at a time


class Urgency(enum.IntEnum):
    """The order of readings. A lower value goes first."""

    ARRIVING = 0
    OWN = 1
    INVENTORY = 2


def choose_thread_count(cores: int) -> int:
    """Return the number of hashing threads for a node with this many cores."""
    return max(LEAST_THREADS, min(MOST_THREADS, cores // CORES_A_THREAD))


class _Reading:
    """The pieces of a reading: from `next` to before `last`, of which `left` are not done."""

    def __init__(self, view: memoryview, pieces: Pieces, first: int, last: int, start: int) -> None:
        self.view, self.pieces, self.start = view, pieces, start
        self.next, self.last, self.left = first, last, last - first
        self.over: Future[str] = Future()


class DigestPool:
    """A pool of hashing threads. They start with the first reading, and end with `close`."""

    def __init__(self, threads: int = 0) -> None:
        """Create the pool.

        Args:
            threads: Number of threads. 0 derives the number from the node's cores.
        """
        self.size = threads or choose_thread_count(len(os.sched_getaffinity(0)))
        self._waiting: dict[Urgency, deque[_Reading]] = {urgency: deque() for urgency in Urgency}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._spent_s = [0.0] * self.size
        self._closed = False

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds used by the threads."""
        return sum(self._spent_s)

    def read(self, memory: Memfd, end: int, start: int = 0, *, urgency: Urgency) -> Future[str]:
        """Hash the bytes from `start` to `end`.

        Raises:
            ValueError: The memory has been given back.
        """
        pieces = Pieces(end - start)
        return self.hash(memory, pieces, 0, pieces.count, start, urgency=urgency)

    def hash(
        self, memory: Memfd, pieces: Pieces, first: int, last: int, start: int = 0, *, urgency: Urgency
    ) -> Future[str]:
        """Hash the pieces from `first` to before `last` (at least one) of the bytes from `start` on.

        The result is valid only once the other pieces are known.

        Raises:
            ValueError: The memory has been given back.
        """
        reading = _Reading(memory.view(), pieces, first, last, start)
        with self._changed:
            if self._closed:
                reading.over.cancel()
            else:
                self._waiting[urgency].append(reading)
                self._start_threads()
                self._changed.notify_all()
        return reading.over

    async def digest(self, memory: Memfd, end: int, start: int = 0, *, urgency: Urgency) -> str:
        """Return the digest of the bytes from `start` to `end`. Cancelling the call ends the reading."""
        return await asyncio.wrap_future(self.read(memory, end, start, urgency=urgency))

    def close(self) -> None:
        """End the threads and cancel pending readings."""
        with self._changed:
            self._closed = True
            for waiting in self._waiting.values():
                for reading in waiting:
                    reading.over.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_threads(self) -> None:
        while len(self._threads) < self.size:
            number = len(self._threads)
            thread = threading.Thread(target=self._run, args=(number,), name=f"gemini-digest-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ---- in the pool's threads -------------------------------------------------------------------------

    def _run(self, thread_index: int) -> None:
        priority.lower()
        hasher = xxhash.xxh3_128()
        while (task := self._wait_for_pieces()) is not None:
            reading, first = task
            count = 0
            for number, start, end in reading.pieces.enumerate_bounds(first, min(reading.last, first + _BATCH)):
                if not reading.over.cancelled():
                    with reading.view[reading.start + start : reading.start + end] as part:
                        hasher.update(part)
                    reading.pieces.put(number, hasher.digest())
                    hasher.reset()
                count += 1
            self._spent_s[thread_index] = time.thread_time()
            self._put(reading, count)

    def _wait_for_pieces(self) -> tuple[_Reading, int] | None:
        """Return the next pieces of the most urgent reading, or None if the pool is closed."""
        with self._changed:
            while True:
                for waiting in self._waiting.values():
                    if waiting:
                        reading, first = waiting[0], waiting[0].next
                        reading.next = min(first + _BATCH, reading.last)
                        if reading.next == reading.last:
                            waiting.popleft()
                        return reading, first
                if self._closed:
                    return None
                self._changed.wait()

    def _put(self, reading: _Reading, count: int) -> None:
        with self._changed:
            reading.left -= count
            if reading.left:
                return
        reading.view.release()
        if reading.over.set_running_or_notify_cancel():
            reading.over.set_result(reading.pieces.compute_digest())
