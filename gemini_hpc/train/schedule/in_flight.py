"""The training's operations that are on the network now, and when each of them ended.

torch offers callbacks on completion, but gloo's threads would have to take the GIL for them: that holds up the
training's own wait, and a callback that is due while Python exits aborts the process. So nothing is called back:
works are asked whether they are complete, by whoever launches, waits or looks next, and by one thread of ours every
millisecond while times are taken (otherwise every 100 ms, so that nobody's tensors stay longer than that).
What each work can tell decides how its end is known:
  caller waits at once (async_op=False)   we wait in its stead; its own wait then returns at once. Exact. Not for
                                          gloo's reduce_scatter while no times are taken: each wait copies its result
  asynchronous                            asked as above: late by 1 ms at most
  gloo's reduce_scatter otherwise         tells nothing, ever: estimated from its bytes
  send                                    gloo tells only that someone has waited for it: estimated from its bytes
  receive                                 complete when it was waited for. It may be posted long before anything
                                          comes: it uses the network for its bytes' time before its end, and does
                                          not count as being in flight; while nothing was launched behind it, it
                                          counts as still to come (`waiting`): a pipeline's bubbles are spent so
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from gemini_hpc import clock
from gemini_hpc.train.schedule.dispatch_hooks import Signature
from gemini_hpc.train.schedule.trace import Record

_POLL_S, _REST_S = 1e-3, 0.1


# Whether it is complete, and who wants to know when.
_Asked = tuple[Callable[[], bool], Record | None]


class InFlight:
    """Works from their launch to their end. `launched` is called by the launching threads, all the rest from
    anywhere."""

    def __init__(self, bytes_per_s: Callable[[], float], note: Callable[[Exception], None]) -> None:
        self._bytes_per_s, self._note = bytes_per_s, note
        self._lock = threading.Lock()
        self._held: list[_Asked] = []
        self._receives: list[_Asked] = []
        self._last: list[Callable[[], bool]] = []  # receives behind all other operations
        self._estimated: list[float] = []
        self._waits = 0
        self.ended_s = 0.0  # when the last of them was seen to have ended
        self._mute: dict[tuple[str, str], bool] = {}
        self._turn = threading.Event()
        self._closing = self._idle = False  # idle: nothing to ask
        self._poll_s = _REST_S
        self._thread = threading.Thread(target=self._run, name="gemini-watch", daemon=True)
        self._thread.start()

    def hurry(self, often: bool) -> None:
        """Whether ends are wanted to the millisecond."""
        self._poll_s = _POLL_S if often else _REST_S
        self._turn.set()

    def close(self) -> None:
        """Forget all works. A thread of ours that asks one while Python exits could abort the process: it has ended
        on return."""
        self._closing = True
        self._turn.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            held, receives, last = self._held, self._receives, self._last
            self._held, self._receives, self._last, self._estimated = [], [], [], []
        del held, receives, last

    def launched(
        self,
        signature: Signature,
        args: tuple[Any, ...],
        work: dist.Work | None,
        backend: str,
        record: Record | None,
        ranks: int,
    ) -> None:
        """An operation was launched by this thread. work: None when it is over; record: gets its end; ranks: in its
        group."""
        asynchronous = signature.asynchronous(args)
        now = clock.monotonic()
        receives = signature.name.startswith("recv")
        if not receives and self._last:
            # nobody wants to know any more when an earlier one ends, unless it is recorded
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
            # a reduce_scatter of gloo is an all_reduce within: all bytes but this rank's own travel twice
            rounds = 1 if signature.name == "send" else 2 * (ranks - 1) / ranks
            size_bytes = signature.payload_bytes(args) if record is None else record.bytes
            until = now + rounds * size_bytes / self._bytes_per_s()
            if record is not None:
                record.end_s = until
            with self._lock:
                self._estimated.append(until)
                self.ended_s = max(self.ended_s, until)
        elif not asynchronous and backend == "gloo":
            with self._lock:
                self._waits += 1
            try:
                with suppress(Exception):  # the caller's own wait raises it again
                    work.wait()
            finally:
                with self._lock:
                    self._waits -= 1
                    self.ended_s = clock.monotonic()
            if record is not None:
                record.end_s = clock.monotonic()
        else:
            # gloo's future knows first, and keeps no inputs
            asked = work.get_future().done if backend == "gloo" else work.is_completed
            over: list[_Asked] = []
            with self._lock:
                # they mostly complete in order, and a launch must not take longer the more are in flight
                self._held[:2] = self._sift(self._held[:2], over, now)
                self._held.append((asked, record))
            over.clear()
            self._rouse()

    def follow(self, asked: Callable[[], bool], record: Record) -> None:
        """Something that does not count as being in flight."""
        with self._lock:
            self._receives.append((asked, record))
        self._rouse()

    def _rouse(self) -> None:
        """There is something to ask again, and an answer is wanted soon."""
        if self._idle and self._poll_s < _REST_S:
            self._turn.set()

    def _is_mute(self, signature: Signature, work: dist.Work, backend: str) -> bool:
        """True for works that never say that they are complete, unless their caller waits for them."""
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
        """Let go of what is complete. Never raises."""
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
        # the last reference to a tensor goes here, outside the lock
        over.clear()

    def _sift(self, works: list[_Asked], over: list[_Asked], now: float) -> list[_Asked]:
        left = []
        for entry in works:
            asked, record = entry
            try:
                complete = asked()
            except Exception as error:
                self._note(error)
                complete = True
            if not complete:
                left.append(entry)
                continue
            over.append(entry)
            self.ended_s = max(self.ended_s, now)
            if record is not None:
                record.end_s = now
        return left

    def now(self) -> int:
        """How many are in flight."""
        self.sweep()
        with self._lock:
            return len(self._held) + len(self._estimated) + self._waits

    @property
    def due_s(self) -> float:
        """When the last one of which the end is estimated ends (CLOCK_MONOTONIC)."""
        return max(self._estimated, default=0.0)

    def newest_busy(self) -> bool:
        """True: the operation launched last is in flight. False says nothing."""
        try:
            return not self._held[-1][0]()
        except IndexError:
            return False
        except Exception as error:
            self._note(error)
            return False

    def waiting(self) -> int:
        """How many receives at the end of what was launched are not complete."""
        if not self._last:
            return 0
        self.sweep()
        with self._lock:
            return len(self._last)

    def _run(self) -> None:
        while not self._closing:
            self._idle = True  # before it looks: what is launched meanwhile ends the wait
            self._idle = not (self._held or self._receives)
            self._turn.wait(_REST_S if self._idle else self._poll_s)
            self._turn.clear()
            self._idle = False
            self.sweep()
