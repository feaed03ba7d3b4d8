"""A monitor of the training's collectives, without user code: their number, their times, and those in flight."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc import clock
from gemini_hpc.core.spans import Trace
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.device.progress import After, Device, Front, Place
from gemini_hpc.train.device.streams import Streams
from gemini_hpc.train.schedule.dispatch_hooks import Dispatch, Signature
from gemini_hpc.train.schedule.in_flight import InFlight
from gemini_hpc.train.schedule.launch_count import GroupWeights, LaunchCount
from gemini_hpc.train.schedule.trace import Iteration, OperationRecord

SPAN_POLL_S = 1e-3  # spans shorter than a few milliseconds carry nothing
LAUNCH_POLL_S = 2e-3  # on a device, whether a collective has begun before its window was over
_SURELY = 0.7  # share of the last duration for which operations are assumed to take again
_CPU = torch.device("cpu")
_KINDS = 4096  # most kinds remembered of a group: with experts, operations may have ever new sizes


class _Group:
    """The properties of a process group that the monitor needs."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_network: Callable[[list[int]], bool],
        names: dict[int, str],
        savers: frozenset[int] | None,
    ) -> None:
        self._names = names
        self.ref = weakref.ref(group)  # weak, so that a destroyed group can be freed
        try:
            ranks = dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # created without torch.distributed's knowledge
            ranks = []
        self.on_network = on_network(ranks) if ranks else True
        self.weights = GroupWeights(ranks, dist.get_rank() if ranks else 0, savers)
        self.size = max(1, len(ranks) or group.size())
        self._name = f"{ranks or group.size()}"
        self._kinds: dict[tuple[str, int], int] = {}
        self._backends: dict[torch.device, str] = {}

    def derive_kind(self, name: str, size_bytes: int) -> int:
        """Return the kind of an operation: a hash of its name, the group's ranks and the bytes.

        The kind is the same in every iteration and in every run.
        """
        found = self._kinds.get((name, size_bytes))
        if found is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
                self._names.clear()
            found = self._kinds[name, size_bytes] = zlib.crc32(f"{name} {self._name} {size_bytes}".encode())
            self._names[found] = name
        return found

    def find_backend(self, device: torch.device) -> str:
        found = self._backends.get(device)
        if found is None:
            group = self.ref()
            assert group is not None
            found = self._backends[device] = group._get_backend(device).name()
        return found


class CollectiveMonitor:
    """The monitor of a process, active from `start()` to `stop()`.

    Nothing here raises into the training. `problem` has the first error, and the training goes on, unmonitored if
    need be.

    Operations are numbered from 0 in each iteration, over all process groups, in the order of their launches by this
    process. Operations of a group that does not use the network (`on_network(ranks)` is false) are numbered too.
    Traces contain them with their end at their start, and they are never in flight.

    Times on CPU (gloo) are the host's, see `in_flight`. An operation, a barrier (0 bytes) included, is busy from its
    launch to its completion, even while it waits for a slow peer. Sends and receives are assumed to need bytes /
    `bytes_per_s`: a send right after its launch, a receive right before its end. A receive for which nothing waited
    within its iteration counts as no time.

    With NCCL, times are the device's (see `train.device`). `launched` then counts the operations that the device has
    reached, and an operation is in flight until the device has ended it. A trace comes some `mark()`s later (`ago`),
    because the host runs ahead.
    """

    def __init__(
        self,
        on_network: Callable[[list[int]], bool],
        bytes_per_s: float = 1e9,
        device: Callable[[], Device] | None = None,
        savers: frozenset[int] | None = None,
    ) -> None:
        """Create a monitor; it watches nothing before `start()`.

        Args:
            on_network: Returns whether a group of these world ranks uses the network.
            bytes_per_s: Rate of one operation; may be set again when measured.
            device: Makes the device of a training that does not compute on the host. Without it the device is made at
                the first NCCL operation.
            savers: Ranks that save versions of this training; None: all.
        """
        self.bytes_per_s = bytes_per_s
        self.count = LaunchCount()
        self._savers = savers
        self.problem = ""
        self.captured = False  # a CUDA graph has collectives: its replays are invisible, so traces end
        # Called in the launching thread: the first two with an operation's number, right before and right after its
        # launch. Then the third with its group, the group's backend and its work (None: the operation is over, or
        # runs on the current stream).
        self.before_launch: Callable[[int], None] | None = None
        self.after_launch: Callable[[int], None] | None = None
        self.launched_on: Callable[[Hashable, str, dist.Work | None], None] | None = None
        self._on_network = on_network
        self._lock = threading.Lock()
        self._dispatch: Dispatch | None = None
        self._flight: InFlight | None = None
        self._device: Device | None = device() if device is not None else None
        self._front: Front | None = None
        self._begins_s: dict[int, float] = {}  # by number of launches: from the iteration's start to the end of all
        self.ago = 0  # iterations that have ended since the one that `mark()` returned last
        self.held_s: float | None = None  # the device's wait at the gate of that iteration; None: unknown
        self._groups: dict[int, _Group] = {}
        self.names: dict[int, str] = {}  # names of operations, by kind
        self._recording = False
        self._reached = threading.Event()  # `_launched` has reached `_wanted`, or `wake` was called
        self._wanted = sys.maxsize
        self._took_s: dict[int, float] = {}  # by number of launches: from the last launch to the end of all
        self._launched_at = 0.0
        self._launched = self._entering = 0  # _entering: counted, and not yet known to `_flight`
        self.launched_before = 0  # operations of the iteration before this one
        self.newest = ""  # name of the operation launched last
        self._iteration = Iteration(False)
        self._number = 0  # number of `mark()`s
        self._finished: deque[tuple[int, Iteration, Iteration]] = deque()
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin to watch. Not allowed while another thread is inside a collective."""
        if self._flight is not None:
            return
        try:
            self._flight = InFlight(lambda: self.bytes_per_s, self._note_error)
            self._flight.hurry(self._recording)
            self._front = None
            self._install_hooks()
        except Exception as error:
            self._note_error(error)
            self.stop()

    def rest(self) -> None:
        """Stop watching but go on counting launches. Not allowed while another thread is inside a collective."""
        self._stop_watching()
        try:
            self._install_hooks()
        except Exception as error:
            self._note_error(error)
            self.stop()

    def _install_hooks(self) -> None:
        if self._dispatch is None:
            self._dispatch = Dispatch(self._on_launching, self._on_launched)
            atexit.register(self.stop)

    def _stop_watching(self) -> None:
        self._recording = False
        flight, self._flight = self._flight, None
        self._front = None
        if flight is not None:
            flight.close()

    def stop(self) -> None:
        """Remove all hooks, so that collectives take their native way again. Runs at exit of Python too.

        Not allowed while another thread is inside a collective.
        """
        if os.getpid() != self._pid:
            return
        dispatch, self._dispatch = self._dispatch, None
        if dispatch is not None:
            dispatch.remove()
        self._stop_watching()
        self.count.mark_unknown()
        atexit.unregister(self.stop)

    @property
    def recording(self) -> bool:
        """Return whether times are recorded.

        Set it to True right before `mark()`: the iteration that begins there is then the first whole one. It may be
        set to False at any time.
        """
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
        """Return the number of operations of this iteration so far.

        A waiting receive is not counted while no operation was launched after it.
        """
        if (front := self._front) is not None:  # a local, because `stop` may clear it at any moment
            return front.poll_position().launched
        waiting = self._flight.count_waiting() if self._flight is not None else 0
        return max(0, self._launched - waiting)

    def count_in_flight(self) -> int:
        """Return the number of operations on the network now."""
        entering = self._entering  # read first: an operation that has left this count is in the others
        front, flight = self._front, self._flight
        flying = front.poll_position().flying if front is not None else 0
        return flying or (flight.count_operations() or entering if flight is not None else 0)

    def find_place(self) -> Place | None:
        """Return the position of the training's device; None: the training computes on the host."""
        front = self._front
        return front.poll_position() if front is not None else None

    def has_caught_up(self) -> bool:
        """Return whether the training's device, if there is one, has reached the newest `mark()`."""
        front = self._front
        return front is None or front.has_caught_up()

    def wait_span(self, after: int, timeout_s: float) -> bool:
        """Wait until `launched` has reached `after` and no operation is in flight.

        Return False on timeout or after `wake`. The launching thread signals the last launch. Ends are then polled
        once a millisecond, but not before most of the time has passed that they took before. On a device everything
        is polled, in the device's current iteration.
        """
        if (front := self._front) is not None:
            return self._wait_front(front, after, timeout_s)
        deadline = clock.monotonic() + timeout_s
        self._wanted = after
        try:
            while (early := self.launched < after) or self._is_busy():
                now = clock.monotonic()
                if now >= deadline:
                    return False
                soon_s = deadline - now
                if launched := self._launched >= after:
                    self._wanted = sys.maxsize
                    # early: a receive is still to come; the durations depend on the number of launches
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

    def wait_launch(self, after: int, timeout_s: float) -> bool:
        """Wait until `launched` has passed `after`. Return False on timeout or after `wake`.

        The launching thread signals the launch. On a device the operations that it reaches are polled.
        """
        deadline = clock.monotonic() + timeout_s
        self._wanted = after + 1
        try:
            while self.launched <= after:
                now = clock.monotonic()
                if now >= deadline:
                    return False
                soon_s = deadline - now if self._front is None else min(deadline - now, LAUNCH_POLL_S)
                if self._reached.wait(soon_s):
                    self._reached.clear()
                    if self.launched <= after:
                        return False
            return True
        finally:
            self._wanted = sys.maxsize

    def _wait_front(self, front: Front, after: int, timeout_s: float) -> bool:
        deadline = clock.monotonic() + timeout_s
        lap = front.poll_position().lap
        while (place := front.poll_position()).lap == lap:
            began_s, now = front.begun_s, clock.monotonic()
            if place.launched >= after and not self.count_in_flight():
                if place.launched == after:
                    if len(self._begins_s) >= _KINDS:
                        self._begins_s.clear()
                    self._begins_s[after] = max(0.0, front.quiet_since - began_s)
                return True
            if now >= deadline:
                return False
            at = began_s + _SURELY * self._begins_s.get(after, 0.0)
            if self._reached.wait(min(deadline - now, max(SPAN_POLL_S, at - now))):
                self._reached.clear()
                return False
        return False

    def _is_busy(self) -> bool:
        """Return whether any operation is in flight; the last one alone mostly decides."""
        flight = self._flight
        return flight is not None and (flight.is_newest_busy() or self.count_in_flight() > 0)

    def wake(self) -> None:
        """Interrupt `wait_span`, so that its caller checks again."""
        self._reached.set()

    def track_round(self, is_complete: Callable[[], bool]) -> OperationRecord:
        """Return a record of something other than the training's operations, such as a round of ours.

        Its end is set when `is_complete` becomes true, to the millisecond while times are recorded.
        """
        record = OperationRecord(0, 0, clock.monotonic())
        if self._flight is not None:
            self._flight.track_receive(is_complete, record)
        return record

    def find_quiet_start(self) -> float:
        """Return when the last operation ended, or the iteration began (CLOCK_MONOTONIC, seconds)."""
        front, flight = self._front, self._flight
        ended_s = flight.ended_s if flight is not None else 0.0
        if front is not None:
            front.poll_position()
            return max(ended_s, front.quiet_since)
        return max(ended_s, self._iteration.started_s)

    def record_gate_reached(self) -> None:
        """Record that the optimizer is about to step (only the first call in an iteration counts)."""
        try:
            iteration, event = self._iteration, self._record_event()
            if self._front is not None and event is not None:
                self._front.record_arrival(event)
            if iteration.whole and iteration.gate_s is None:
                if self._flight is not None:
                    self._flight.sweep()
                iteration.gate_s, iteration.gate_event = clock.monotonic(), event
        except Exception as error:
            self._note_error(error)

    def record_gate_passed(self, failing_s: float = 0.0) -> None:
        """Record that the wait before the optimizer's step is over.

        Args:
            failing_s: Seconds of the wait in which a node or an agent was missing.
        """
        try:
            if self._front is not None and (event := self._record_event()) is not None:
                self._front.record_pass(event, failing_s)
                if self._iteration.whole:
                    self._iteration.passed_event = event
        except Exception as error:
            self._note_error(error)

    @property
    def on_device(self) -> bool:
        """Return whether the training computes on a device, which its host runs ahead of."""
        return self._device is not None

    @property
    def waited_s(self) -> float | None:
        """Return the seconds that the device waited at the optimizer in the newest iteration that it has ended.

        Seconds in which a node or an agent was missing do not count. None: the training computes on the host, or no
        such iteration is known yet.
        """
        return self._front.waited_s if self._front is not None else None

    def mark(self) -> Trace | None:
        """End the current iteration and begin the next. Return a trace if one is ready.

        The trace is that of the oldest whole iteration not yet returned, provided that all its times are known by
        now.
        """
        try:
            if self._flight is not None:
                self._flight.sweep()
            event = self._record_event()
            with self._lock:
                done, self._iteration = self._iteration, Iteration(self._recording, event)
                self.launched_before, self._launched = self._launched, 0
                if event is not None and self._front is not None:
                    self._front.begin_iteration(event)
                elif event is not None and self._flight is not None:
                    self._front = Front(event, clock.monotonic)
            self._number += 1
            if self._device is not None and event is None:  # a CUDA graph is being captured
                done.whole = self._iteration.whole = False
            if done.whole:
                self._finished.append((self._number, done, self._iteration))
            if self.captured:
                self._finished.clear()
            if self._finished and self._finished[0][1].has_all_times(self._finished[0][2]):
                number, done, following = self._finished.popleft()
                self.ago, self.held_s = self._number - number, done.held_s
                return done.build_trace(following, self.bytes_per_s, self._front.time_mark if self._front else None)
        except Exception as error:
            self._finished.clear()
            self._note_error(error)
        return None

    def _record_event(self) -> Event | None:
        """Return an event behind all launches so far; None where there is no device."""
        if self._device is None or self._flight is None or self._device.is_capturing():
            return None
        return self._device.record_mark()

    def _note_error(self, error: Exception) -> None:
        self._iteration.whole = False
        self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _find_group(self, boxed: Any) -> _Group:
        group = dist.ProcessGroup.unbox(boxed)
        found = self._groups.get(id(group))
        if found is None or found.ref() is not group:
            for gone in [key for key, known in self._groups.items() if known.ref() is None]:
                self._groups.pop(gone, None)
            found = self._groups[id(group)] = _Group(group, self._on_network, self.names, self._savers)
        return found

    def _on_launching(self, signature: Signature, args: tuple[Any, ...]) -> Any:
        """Return the time of a launch: by the clock, or as an event on the current stream."""
        if self._flight is None or os.getpid() != self._pid:
            return 0.0
        try:
            if self.before_launch is not None:
                tensor = signature.find_tensor(args)
                if tensor is None or not tensor.is_meta:
                    self.before_launch(self._launched)
        except Exception as error:
            self._note_error(error)
        try:
            if self._front is not None and (event := self._record_event()) is not None:
                return event
        except Exception as error:
            self._note_error(error)
        return clock.monotonic()

    def _on_launched(self, signature: Signature, args: tuple[Any, ...], result: Any, begun: Any) -> None:
        if os.getpid() != self._pid:  # a fork has the kernels, but neither our thread nor reliable locks
            return
        group, backend, record, work, ended = None, "", None, None, None
        try:
            tensor = signature.find_tensor(args)
            if tensor is not None and tensor.is_meta:  # a compiler traces the program: nothing was launched
                return
            if tensor is not None and tensor.is_cuda and (self._device or Streams()).is_capturing():
                self.captured = True
                return
            group = self._find_group(args[signature.group_at])
            self.count.add(group.weights, signature, args)
            if self._flight is None:
                return
            backend = group.find_backend(tensor.device if tensor is not None else _CPU)
            returned = result[-1] if isinstance(result, (tuple, list)) and result else result
            work = dist.Work.unbox(returned) if isinstance(returned, torch.ScriptObject) else None
            if self._recording:
                size_bytes = signature.count_payload_bytes(args)
                start_s = begun if isinstance(begun, float) else clock.monotonic()
                record = OperationRecord(group.derive_kind(signature.name, size_bytes), size_bytes, start_s)
            ended = self._record_end(group, backend, work, begun, lambda: signature.count_payload_bytes(args))
        except Exception as error:
            self._note_error(error)
            self.count.mark_unknown()
        with self._lock:
            number, self.newest = self._launched, signature.name
            self._launched, self._launched_at = number + 1, clock.monotonic()
            self._entering += 1
            if record is not None:
                self._iteration.records.append(record)
                self._record_times(record, backend, begun, ended)
            if self._front is not None and not isinstance(begun, float):
                self._front.record_collective(begun, ended or begun)
        if number + 1 >= self._wanted:  # before `InFlight.record_launch`, which may wait for the operation's end
            self._reached.set()
        try:
            if self.after_launch is not None:
                self.after_launch(number)
            if self.launched_on is not None and group is not None:
                self.launched_on(group, backend, work)
            flight = self._flight
            if group is None or flight is None:
                return
            if not group.on_network:
                if record is not None:
                    record.end_s = record.start_s
            elif not self._runs_it(backend):
                flight.record_launch(signature, args, work, backend, record, group.size)
        except Exception as error:
            self._note_error(error)
        finally:
            with self._lock:
                self._entering -= 1

    def _record_end(
        self, group: _Group, backend: str, work: dist.Work | None, begun: Any, size: Callable[[], int]
    ) -> Event | None:
        """Return an event at the end of the operation just launched; None where there is no device.

        An operation that does not run on the device over the network ends there as it begins.
        """
        if backend == Streams.backend and self._device is None:
            self._device = Streams()
        if self._device is None or isinstance(begun, float):
            return None
        if not self._runs_it(backend) or not group.on_network:
            return begun  # type: ignore[no-any-return]
        if not self._device.is_grouping():
            with suppress(RuntimeError):
                return self._device.record_end(work)
        return After(begun, size() / self.bytes_per_s, clock.monotonic)

    def _runs_it(self, backend: str) -> bool:
        """Return whether operations of this backend run on the device."""
        return self._device is not None and backend == self._device.backend

    def _record_times(self, record: OperationRecord, backend: str, begun: Any, ended: Event | None) -> None:
        """Record an operation's times on the device.

        Iterations that began before the device was known are not used.
        """
        if isinstance(begun, float):
            self._iteration.whole = self._iteration.whole and not self._runs_it(backend)
        elif self._iteration.event is None:
            self._iteration.whole = False
        else:
            record.events = begun, ended or begun
