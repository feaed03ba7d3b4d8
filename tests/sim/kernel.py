"""Processes in one thread, on one event loop with a time of its own: a seed repeats a run to the letter.

The loop is asyncio's, so coroutines, tasks, timers and locks are the real ones. What asyncio would ask the system for
is here: time passes when nobody has anything to do; a connection is a pair of queues (`network`); threads are
greenlets, which go on until they would block. Each callback belongs to a process. One that has been killed is never
called again, not even to clean up; one that has been stopped waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

import greenlet

T = TypeVar("T")
START_S = 1_700_000_000.0
_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Stuck(Exception):
    """Nothing will ever happen any more."""


class Killed(BaseException):
    """The process at work ends here."""


class Process:
    """What a kill ends. host: its name; on_kill: what the system does then, such as closing connections."""

    def __init__(self, loop: SimLoop, name: str, host: str) -> None:
        self.loop, self.name, self.host = loop, name, host
        self.alive, self.stopped = True, False
        self.failures: list[dict[str, Any]] = []
        self.on_kill: list[Callable[[], None]] = []
        self.handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self.held: deque[asyncio.Handle] = deque()
        self.threads: list[greenlet.greenlet] = []
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self.dies_in = -1  # callbacks; -1: not so soon
        self.user_id: int | None = None  # None: as `system` has it

    def __repr__(self) -> str:
        return f"{self.name}@{self.host}"

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it as part of this process."""
        task = self.context.run(self.loop.create_task, coroutine)
        self.loop.graves.append(task)  # a coroutine that is collected runs its `finally` blocks
        return task

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call it as part of this process."""
        self.loop.call_soon(callback, *args, context=self.context.copy())

    def kill(self) -> None:
        """SIGKILL."""
        if self.alive:
            self.alive = False
            self.held.clear()
            for closed in self.on_kill:
                closed()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        self.loop.ready(self.held)
        self.held.clear()


def current() -> Process:
    """The process at work."""
    found = _PROCESS.get()
    assert found is not None, "no process is at work"
    return found


class SimLoop(asyncio.base_events.BaseEventLoop):
    """See the module."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.turns = 0
        self.graves: list[Any] = []
        self.after_turn: Callable[[], None] = lambda: None
        self.hub = greenlet.getcurrent()
        self.network: Any = None

    # ---- turns -----------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        # Who waits for the rest of a time would else wait for nothing again and again: no clock goes on meanwhile.
        return super().call_later(max(delay, 1e-6), callback, *args, context=context)

    def ready(self, handles: deque[asyncio.Handle]) -> None:
        """These are to be called next."""
        self._ready.extend(handles)

    def _run_once(self) -> None:
        if not self._ready:
            while self._scheduled and self._scheduled[0]._cancelled:
                heapq.heappop(self._scheduled)._scheduled = False
            if not self._scheduled:
                raise Stuck
            self.now = max(self.now, self._scheduled[0]._when)
        while self._scheduled and self._scheduled[0]._when <= self.now:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            self._ready.append(timer)
        handle = self._ready.popleft()
        if handle._cancelled:
            return
        process = handle._context.get(_PROCESS)
        if process is not None:
            if not process.alive:
                self.graves.append(handle)
                return
            if process.stopped:
                process.held.append(handle)
                return
            if process.dies_in >= 0:
                process.dies_in -= 1
                if process.dies_in < 0:
                    self.graves.append(handle)
                    process.kill()
                    return
        handle._run()
        self.turns += 1
        self.after_turn()

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...

    def set_exception_handler(self, handler: Any) -> None:
        found = _PROCESS.get()
        if found is not None:
            found.handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), Killed):
            return
        found = _PROCESS.get()
        if found is None or found.handler is None:
            raise context.get("exception") or RuntimeError(context.get("message"))
        found.failures.append(context)
        found.handler(self, context)

    # ---- threads ---------------------------------------------------------------------------------------

    def thread(self, process: Process, work: Callable[[], object], delay_s: float = 0.0) -> None:
        """Run `work` as a thread of this process."""

        def begin() -> None:
            green = greenlet.greenlet(work, self.hub)
            green.gr_context = process.context.copy()
            process.threads.append(green)
            green.switch()

        self.call_at(self.now + delay_s, begin, context=process.context.copy())

    def block(self, until: Callable[[Callable[[], None]], object], timeout_s: float | None = None) -> bool:
        """From a thread: wait until the function that `until` is given is called. False: it was not, in time."""
        green = greenlet.getcurrent()
        assert green is not self.hub, "only a thread can wait"
        process, over = current(), [False, False]

        def go_on(*, timed_out: bool = False) -> None:
            if not over[0]:
                over[:] = [True, timed_out]
                self.call_soon(green.switch, context=process.context.copy())

        timer = None
        if timeout_s is not None:
            timer = self.call_at(self.now + timeout_s, lambda: go_on(timed_out=True), context=process.context.copy())
        until(go_on)
        self.hub.switch()
        if timer is not None:
            timer.cancel()
        return not over[1]

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.thread(current(), work, self.rng.uniform(0.0, 0.002))
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    # ---- the network -----------------------------------------------------------------------------------

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self.network.connect(protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self.network.listen(protocol_factory, port)

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return self.network.addresses(host, port)


class Joined(futures.Future[Any]):
    """What a thread waits for that has given the loop something to do."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            loop = current().loop
            loop.block(lambda go_on: self.add_done_callback(lambda _: go_on()), timeout)
        return super().result(0)


def run_coroutine_threadsafe(coroutine: Coroutine[Any, Any, Any], loop: SimLoop) -> Joined:
    """As asyncio's."""
    joined, process = Joined(), current()

    def begin() -> None:
        task = loop.create_task(coroutine)
        loop.graves.append(task)
        task.add_done_callback(over)
        joined.add_done_callback(lambda f: task.cancel() if f.cancelled() else None)

    def over(task: asyncio.Task[Any]) -> None:
        if joined.cancelled() or not joined.set_running_or_notify_cancel():
            return
        if task.cancelled():
            joined.set_exception(futures.CancelledError())
        elif task.exception() is not None:
            joined.set_exception(task.exception())
        else:
            joined.set_result(task.result())

    process.soon(begin)
    return joined


class Thread:
    """As threading's."""

    def __init__(
        self, *, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "", daemon: bool = True
    ) -> None:
        self._work, self._process, self._waiting = (lambda: target(*args)), current(), list[Callable[[], None]]()
        self._over = False

    def start(self) -> None:
        """Begin, a moment later."""
        loop = self._process.loop
        loop.thread(self._process, self._run, loop.rng.uniform(0.0, 0.0005))

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._over = True
            for go_on in self._waiting:
                go_on()

    def join(self, timeout: float | None = None) -> None:
        """Until it has ended."""
        if not self._over:
            self._process.loop.block(self._waiting.append, timeout)


class Condition:
    """As threading's. Only a wait lets another thread go on, so that there is nothing to lock."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_for(self, there: Callable[[], object]) -> None:
        """Wait until `there()` is true. The thread that makes it true calls `notify_all`."""
        while not there():
            current().loop.block(self._waiting.append)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until `notify_all`, or for `timeout` seconds."""
        current().loop.block(self._waiting.append, timeout)

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()


class Clock:
    """That of the host at work. skew_s: by how much the time of day of a host is wrong."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.skew_s: dict[str, float] = {}

    def monotonic_ns(self) -> int:
        return int(self._loop.now * 1e9)

    def time(self) -> float:
        found = _PROCESS.get()
        return START_S + self._loop.now + (self.skew_s.get(found.host, 0.0) if found is not None else 0.0)

    def sleep(self, seconds: float) -> None:
        self._loop.block(lambda go_on: None, seconds)
