"""The training's operations that are on the network now, and the end times of all.

torch offers callbacks on completion, but gloo's threads would have to take the GIL for them. That delays the
training's own wait, and a callback that is due while Python exits aborts the process. Works are therefore polled: by
every thread that launches, waits or asks, and by one thread of ours. This thread polls every millisecond while times
are recorded. Otherwise it polls every 100 ms, so that tensors are not kept alive longer.

The end of each work is found according to what the work reports:

    caller waits at once (async_op=False)   we wait first; the caller's own wait then returns at once. Exact. Not done
                                            for gloo's reduce_scatter while no times are recorded, because each wait
                                            copies its result
    asynchronous                            polled as above: late by at most 1 ms
    gloo's reduce_scatter otherwise         never reports completion: estimated from its bytes
    send                                    gloo reports only that someone has waited for it: estimated from its bytes
    receive                                 complete once waited for. It may be posted long before data arrive. It
                                            uses the network for its bytes' time before its end, and does not count
                                            as in flight. While nothing was launched after it, it counts as still to
                                            come (`count_waiting`), so that the bubbles of a pipeline can be used
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from gemini_hpc import clock
from gemini_hpc.train.schedule.dispatch_hooks import Signature
from gemini_hpc.train.schedule.trace import OperationRecord

_POLL_S, _REST_S = 1e-3, 0.1  # as exact as spans need to be; ten looks a second where nobody asks


# The completion test of a work, and the record for its end time.
_Asked = tuple[Callable[[], bool], OperationRecord | None]


class InFlight:
    """The works of the training from their launch to their end.

    Only launching threads call `record_launch`. The other methods are thread-safe.
    """

    def __init__(self, measure_bytes_per_s: Callable[[], float], report_error: Callable[[Exception], None]) -> None:
        self._measure_bytes_per_s, self._report_error = measure_bytes_per_s, report_error
        self._lock = threading.Lock()
        self._held: list[_Asked] = []
        self._receives: list[_Asked] = []
        self._last: list[Callable[[], bool]] = []  # receives launched after all other operations
        self._estimated: list[float] = []
        self._waits = 0
        self.ended_s = 0.0  # when the latest end was observed or estimated
        self._mute: dict[tuple[str, str], bool] = {}
        self._turn = threading.Event()
        self._closing = self._idle = False  # idle: nothing to poll
        self._poll_s = _REST_S
        self._thread = threading.Thread(target=self._run, name="gemini-watch", daemon=True)
        self._thread.start()

    def hurry(self, often: bool) -> None:
        """Poll every millisecond if `often`, else every 100 ms."""
        self._poll_s = _POLL_S if often else _REST_S
        self._turn.set()

    def close(self) -> None:
        """End the polling thread and forget all works.

        The thread has ended on return, because polling a work while Python exits could abort the process.
        """
        self._closing = True
        self._turn.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            held, receives, last = self._held, self._receives, self._last
            self._held, self._receives, self._last, self._estimated = [], [], [], []
        del held, receives, last

    def record_launch(
        self,
        signature: Signature,
        args: tuple[Any, ...],
        work: dist.Work | None,
        backend: str,
        record: OperationRecord | None,
        ranks: int,
    ) -> None:
        """Record that the calling thread launched an operation.

        Args:
            signature: The operation's signature.
            args: The operation's arguments.
            work: The operation's work; None if the operation is over.
            backend: Name of the backend.
            record: Record that receives the end time; None while no times are recorded.
            ranks: Number of ranks in the group.
        """
        asynchronous = signature.is_asynchronous(args)
        now = clock.monotonic()
        receives = signature.name.startswith("recv")
        if not receives and self._last:
            # the end of an earlier receive matters only if it is recorded
            with self._lock:
                gone, self._last = (self._receives, self._last), []
                self._receives = [entry for entry in self._receives if entry[1] is not None]
            del gone
        if work is None:
            if record is not None:
                record.end_s = now
        elif receives:
            if record is not None:
                record.receives = True
            asked = work.is_completed
            with self._lock:
                self._receives.append((asked, record))
                self._last.append(asked)
            self._rouse()
        elif self._is_mute(signature, work, backend) and (asynchronous or record is None):
            # gloo implements reduce_scatter as all_reduce: all bytes but this rank's own travel twice
            rounds = 1 if signature.name == "send" else 2 * (ranks - 1) / ranks
            size_bytes = signature.count_payload_bytes(args) if record is None else record.bytes
            until = now + rounds * size_bytes / self._measure_bytes_per_s()
            if record is not None:
                record.end_s = until
            with self._lock:
                self._estimated.append(until)
                self.ended_s = max(self.ended_s, until)
        elif not asynchronous and backend == "gloo":
            with self._lock:
                self._waits += 1
            try:
                with suppress(Exception):  # the caller's own wait raises the error again
                    work.wait()
            finally:
                with self._lock:
                    self._waits -= 1
                    self.ended_s = clock.monotonic()
            if record is not None:
                record.end_s = clock.monotonic()
        else:
            # gloo's future is complete first, and does not keep the inputs alive
            asked = work.get_future().done if backend == "gloo" else work.is_completed
            over: list[_Asked] = []
            with self._lock:
                # works mostly complete in order, and a launch must not take longer with more works in flight
                self._held[:2] = self._sift(self._held[:2], over, now)
                self._held.append((asked, record))
            over.clear()
            self._rouse()

    def track_receive(self, is_complete: Callable[[], bool], record: OperationRecord) -> None:
        """Poll `is_complete` until true and set the record's end; the operation does not count as in flight."""
        with self._lock:
            self._receives.append((is_complete, record))
        self._rouse()

    def _rouse(self) -> None:
        """Wake the polling thread if it is idle and ends are wanted to the millisecond."""
        if self._idle and self._poll_s < _REST_S:
            self._turn.set()

    def _is_mute(self, signature: Signature, work: dist.Work, backend: str) -> bool:
        """Return whether a work never reports its completion unless its caller waits for it."""
        if backend != "gloo":
            return False
        found = self._mute.get((signature.name, backend))
        if found is None:
            try:
                work.get_future()
                found = False
            except RuntimeError:
                found = True
            self._mute[signature.name, backend] = found
        return found

    def sweep(self) -> None:
        """Release all complete works and set their records' ends. Never raises."""
        if not (self._held or self._receives or self._estimated):
            return
        over: list[_Asked] = []
        with self._lock:
            now = clock.monotonic()
            self._held = self._sift(self._held, over, now)
            receives, self._receives = self._receives, self._sift(self._receives, over, now)
            if len(self._receives) < len(receives):
                complete = [asked for asked, _ in over]
                at = max((i for i, asked in enumerate(self._last, 1) if asked in complete), default=0)
                over += [(asked, None) for asked in self._last[:at]]
                del self._last[:at]
            self._estimated = [until for until in self._estimated if until > now]
        # this may drop the last reference to a tensor, so it is done outside the lock
        over.clear()

    def _sift(self, works: list[_Asked], over: list[_Asked], now: float) -> list[_Asked]:
        left = []
        for entry in works:
            asked, record = entry
            try:
                complete = asked()
            except Exception as error:
                self._report_error(error)
                complete = True
            if not complete:
                left.append(entry)
                continue
            over.append(entry)
            self.ended_s = max(self.ended_s, now)
            if record is not None:
                record.end_s = now
        return left

    def count_operations(self) -> int:
        """Return the number of operations in flight."""
        self.sweep()
        with self._lock:
            return len(self._held) + len(self._estimated) + self._waits

    @property
    def due_s(self) -> float:
        """Return the latest estimated end of the operations whose end is estimated (CLOCK_MONOTONIC)."""
        return max(self._estimated, default=0.0)

    def is_newest_busy(self) -> bool:
        """Return True if the operation launched last is in flight; False is inconclusive."""
        try:
            return not self._held[-1][0]()
        except IndexError:
            return False
        except Exception as error:
            self._report_error(error)
            return False

    def count_waiting(self) -> int:
        """Return the number of incomplete receives that were launched after all other operations."""
        if not self._last:
            return 0
        self.sweep()
        with self._lock:
            return len(self._last)

    def _run(self) -> None:
        while not self._closing:
            self._idle = True  # set before the check, so that a launch meanwhile ends the wait
            self._idle = not (self._held or self._receives)
            self._turn.wait(_REST_S if self._idle else self._poll_s)
            self._turn.clear()
            self._idle = False
            self.sweep()
