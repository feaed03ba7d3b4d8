"""Sees every collective of the training, without user code: how many, when, and whether one is on the network now."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.core.spans import Trace
from gemini_hpc.train.dispatch import Dispatch, Signature
from gemini_hpc.train.flight import Flight
from gemini_hpc.train.iteration import Iteration, Record
from gemini_hpc.train.streams import Streams

SPAN_POLL_S = 1e-3
_SURELY = 0.7  # of the time that operations took they will take again
_CPU = torch.device("cpu")
_KINDS = 4096  # of a group; with operations of ever new sizes (experts) they are not all worth remembering


class _Group:
    """What is known of a process group."""

    def __init__(
        self, group: dist.ProcessGroup, on_network: Callable[[list[int]], bool], names: dict[int, str]
    ) -> None:
        self._names = names
        self.ref = weakref.ref(group)  # a destroyed group must be free to go
        try:
            ranks = dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # made behind torch.distributed's back
            ranks = []
        self.on_network = on_network(ranks) if ranks else True
        self.size = max(1, len(ranks) or group.size())
        self._name = f"{ranks or group.size()}"
        self._kinds: dict[tuple[str, int], int] = {}
        self._backends: dict[torch.device, str] = {}

    def kind(self, name: str, size_bytes: int) -> int:
        """The same in every iteration and in every run: of the operation's name, the group's ranks and the bytes."""
        found = self._kinds.get((name, size_bytes))
        if found is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
                self._names.clear()
            found = self._kinds[name, size_bytes] = zlib.crc32(f"{name} {self._name} {size_bytes}".encode())
            self._names[found] = name
        return found

    def backend(self, device: torch.device) -> str:
        found = self._backends.get(device)
        if found is None:
            group = self.ref()
            assert group is not None
            found = self._backends[device] = group._get_backend(device).name()
        return found


class Watch:
    """One per process, from `start()` to `stop()`. Nothing here raises into the training: `problem` says what went
    wrong first, and the training goes on, unseen if need be.

    Operations are numbered from 0 in each iteration, over all process groups, in the order of their launches by this
    process. Those of a group that does not use the network (`on_network(ranks)` is false) are numbered and kept in
    the traces, where they end when they start; they are never in flight.

    Times on CPU (gloo) are the host's, see `flight`: an operation is busy from its launch to its completion, also
    while it waits for a slow peer, and a barrier (0 bytes) likewise. Sends and receives are taken to need
    bytes / `bytes_per_s`: a send right after its launch, a receive right before its end (a receive for which nobody
    waited within its iteration counts as no time).
    With NCCL they are the device's, see `streams` [not run yet]: `in_flight` is not known there and not counted; a
    trace comes one `mark()` later, as the host runs ahead.
    """

    def __init__(self, on_network: Callable[[list[int]], bool], bytes_per_s: float = 1e9) -> None:
        """bytes_per_s: of one operation at a time; may be set again when it has been measured."""
        self.bytes_per_s = bytes_per_s
        self.problem = ""
        self.captured = False  # a CUDA graph has collectives: replays of them are not seen, there are no more traces
        # Called in the launching thread: with an operation's number right before and right after its launch; after
        # that with its group, the group's backend and its work (None: it is over, or runs on the current stream).
        self.before_launch: Callable[[int], None] | None = None
        self.after_launch: Callable[[int], None] | None = None
        self.launched_on: Callable[[Hashable, str, dist.Work | None], None] | None = None
        self._on_network = on_network
        self._lock = threading.Lock()
        self._dispatch: Dispatch | None = None
        self._flight: Flight | None = None
        self._streams: Streams | None = None
        self._groups: dict[int, _Group] = {}
        self.names: dict[int, str] = {}  # of operations, by kind
        self._recording = False
        self._reached = threading.Event()  # `_launched` has come to `_wanted`, or there is something else to see
        self._wanted = sys.maxsize
        self._took_s: dict[int, float] = {}  # by number of launches: from the last of them to the end of all
        self._launched_at = 0.0
        self._launched = self._entering = 0  # the latter: counted, and not yet known to `_flight`
        self.launched_before = 0  # operations of the iteration before this one
        self._iteration = Iteration(False)
        self._finished: deque[tuple[Iteration, Iteration]] = deque()
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin to watch. Not while another thread is inside a collective."""
        if self._dispatch is not None:
            return
        try:
            self._flight = Flight(lambda: self.bytes_per_s, self._note)
            self._flight.hurry(self._recording)
            self._dispatch = Dispatch(self._before, self._after)
            atexit.register(self.stop)
        except Exception as error:
            self._note(error)
            self.stop()

    def stop(self) -> None:
        """Leave nothing behind: collectives take their native way again. Also at exit of Python. Not while another
        thread is inside a collective."""
        if os.getpid() != self._pid:
            return
        self._recording = False
        dispatch, self._dispatch = self._dispatch, None
        flight, self._flight = self._flight, None
        if dispatch is not None:
            dispatch.remove()
        if flight is not None:
            flight.close()
        atexit.unregister(self.stop)

    @property
    def recording(self) -> bool:
        """Whether times are taken. Set it to True right before `mark()`: the iteration that begins there is then the
        first whole one. Set to False at any time."""
        return self._recording

    @recording.setter
    def recording(self, on: bool) -> None:
        self._recording = on
        if not on:
            self._iteration.whole = False
        if self._flight is not None:
            self._flight.hurry(on)

    @property
    def launched(self) -> int:
        """Operations of this iteration so far; a receive that waits, with nothing launched behind it, comes yet."""
        waiting = self._flight.waiting() if self._flight is not None else 0
        return max(0, self._launched - waiting)

    def in_flight(self) -> int:
        """Operations on the network now."""
        entering = self._entering  # before the others: what has left this is there
        return self._flight.now() or entering if self._flight is not None else 0

    def wait_span(self, after: int, timeout_s: float) -> bool:
        """Wait until `launched` has come to `after` and none is in flight. False: that takes too long, or `wake` was
        called. The launching thread says when enough are launched; then ends are looked for once a millisecond, but
        not before most of the time that they took the last time has passed."""
        deadline = time.monotonic() + timeout_s
        self._wanted = after
        try:
            while (early := self.launched < after) or self._busy():
                now = time.monotonic()
                if now >= deadline:
                    return False
                soon_s = deadline - now
                if launched := self._launched >= after:
                    self._wanted = sys.maxsize
                    # early: a receive comes yet; more than `after`: these take their own time
                    usual_s = 0.0 if early else _SURELY * self._took_s.get(self._launched, 0.0)
                    at = max(self._launched_at + usual_s, self._flight.due_s if self._flight is not None else 0.0)
                    soon_s = min(soon_s, max(SPAN_POLL_S, at - now))
                if self._reached.wait(soon_s):
                    self._reached.clear()
                    if launched or self._launched < after:
                        return False
            if self._flight is not None and (number := self._launched) >= after:
                if len(self._took_s) >= _KINDS:
                    self._took_s.clear()
                self._took_s[number] = max(0.0, self._flight.ended_s - self._launched_at)
            return True
        finally:
            self._wanted = sys.maxsize

    def _busy(self) -> bool:
        """Whether any is in flight; in most cases the last one says it."""
        flight = self._flight
        return flight is not None and (flight.newest_busy() or self.in_flight() > 0)

    def wake(self) -> None:
        """Who waits for a span shall look again."""
        self._reached.set()

    def follow(self, asked: Callable[[], bool]) -> Record:
        """Of something else than the training's operations: its end, to the millisecond while times are taken."""
        record = Record(0, 0, time.monotonic())
        if self._flight is not None:
            self._flight.follow(asked, record)
        return record

    def quiet_since(self) -> float:
        """When the last operation ended, or the iteration began (CLOCK_MONOTONIC)."""
        ended_s = self._flight.ended_s if self._flight is not None else 0.0
        return max(ended_s, self._iteration.started_s)

    def gate(self) -> None:
        """The optimizer is about to step (the first time in an iteration counts)."""
        try:
            iteration = self._iteration
            if iteration.whole and iteration.gate_s is None:
                if self._flight is not None:
                    self._flight.sweep()
                iteration.gate_s, iteration.gate_event = time.monotonic(), self._event()
        except Exception as error:
            self._note(error)

    def mark(self) -> Trace | None:
        """An iteration ends and the next begins. Returns the trace of the oldest iteration that was recorded as a
        whole and not returned before, if all its times are known by now."""
        try:
            if self._flight is not None:
                self._flight.sweep()
            event = self._event() if self._recording or self._iteration.whole else None
            with self._lock:
                done, self._iteration = self._iteration, Iteration(self._recording, event)
                self.launched_before, self._launched = self._launched, 0
            if done.whole:
                self._finished.append((done, self._iteration))
            if self.captured:
                self._finished.clear()
            if self._finished and self._finished[0][0].known(self._finished[0][1]):
                done, following = self._finished.popleft()
                return done.trace(following, self.bytes_per_s)
        except Exception as error:
            self._finished.clear()
            self._note(error)
        return None

    def _event(self) -> Any:
        """Where the device is now; None before the first operation of NCCL."""
        return self._streams.here() if self._streams is not None and not self._streams.capturing() else None

    def _note(self, error: Exception) -> None:
        self._iteration.whole = False
        self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _group(self, boxed: Any) -> _Group:
        group = dist.ProcessGroup.unbox(boxed)
        found = self._groups.get(id(group))
        if found is None or found.ref() is not group:
            for gone in [key for key, known in self._groups.items() if known.ref() is None]:
                self._groups.pop(gone, None)
            found = self._groups[id(group)] = _Group(group, self._on_network, self.names)
        return found

    def _before(self, signature: Signature, args: tuple[Any, ...]) -> Any:
        """When: on the clock, or on the current stream."""
        if self.before_launch is not None and os.getpid() == self._pid:
            try:
                tensor = signature.tensor(args)
                if tensor is None or not tensor.is_meta:
                    self.before_launch(self._launched)
            except Exception as error:
                self._note(error)
        if self._streams is not None and self._recording:
            try:
                tensor = signature.tensor(args)
                if tensor is not None and tensor.is_cuda and (event := self._event()) is not None:
                    return event
            except Exception as error:
                self._note(error)
        return time.monotonic()

    def _after(self, signature: Signature, args: tuple[Any, ...], result: Any, begun: Any) -> None:
        if os.getpid() != self._pid:  # a fork has the kernels, but neither our thread nor a lock that it can trust
            return
        group, backend, record = None, "", None
        try:
            tensor = signature.tensor(args)
            if tensor is not None and tensor.is_meta:  # a compiler looks at the program: nothing was launched
                return
            if tensor is not None and tensor.is_cuda and Streams.capturing():
                self.captured = True
                return
            group = self._group(args[signature.group_at])
            backend = group.backend(tensor.device if tensor is not None else _CPU)
            if self._recording:
                size_bytes = signature.payload_bytes(args)
                start_s = begun if isinstance(begun, float) else time.monotonic()
                record = Record(group.kind(signature.name, size_bytes), size_bytes, start_s)
        except Exception as error:
            self._note(error)
        with self._lock:
            number = self._launched
            self._launched, self._launched_at = number + 1, time.monotonic()
            self._entering += 1
            if record is not None:
                self._iteration.records.append(record)
        if number + 1 >= self._wanted:  # before the end of what is waited for here (`Flight.launched`)
            self._reached.set()
        try:
            if self.after_launch is not None:
                self.after_launch(number)
            returned = result[-1] if isinstance(result, (tuple, list)) and result else result
            work = dist.Work.unbox(returned) if isinstance(returned, torch.ScriptObject) else None
            if self.launched_on is not None and group is not None:
                self.launched_on(group, backend, work)
            flight = self._flight
            if group is None or flight is None:
                return
            if not group.on_network:
                if record is not None:
                    record.end_s = record.start_s
                return
            if backend != "nccl":
                flight.launched(signature, args, work, backend, record, group.size)
            elif record is not None:
                self._on_device(record, begun, work)
        except Exception as error:
            self._note(error)
        finally:
            with self._lock:
                self._entering -= 1

    def _on_device(self, record: Record, begun: Any, work: dist.Work | None) -> None:
        """An operation of NCCL was launched; not in iterations that began before there was one at all."""
        if self._streams is None:
            self._streams = Streams()
        if self._iteration.event is None or isinstance(begun, float):
            self._iteration.whole = False
        else:
            record.events = begun, self._streams.end(work)
