"""Devices that exist only here: streams are queues, a scheduler chooses what runs next, and deadlocks are real.

What is modelled. A stream does its work in order; between streams there is no order but by events. A collective, and
a group of sends and receives, is a kernel that takes one of few places on its device as soon as its stream comes to
it, and keeps it until all its other ends hold a place too: so two operations that two devices begin in different
orders wait for each other for ever. Which of all possible things happens next is chosen by a seed: also how far each
host runs ahead of its device. Buffers hold real bytes, moved at some moment while both kernels run, so that a buffer
that is used again too early shows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gemini_hpc.train.device.interface import Broken, Message

IDLE_S = 0.25
_IDLE_LOOKS = 80


class Deadlock(AssertionError):
    """Work remains, and nothing can happen."""


class FakeEvent:
    def __init__(self, clock: Callable[[], float], *, done: bool = False) -> None:
        self.done, self.at, self._clock = done, 0.0, clock

    def reach(self) -> None:
        self.done, self.at = True, self._clock()

    def query(self) -> bool:
        return self.done

    def count_seconds_since(self, earlier: Any) -> float:
        assert self.done and earlier.done
        return float(self.at - earlier.at)


@dataclass(eq=False)
class Op:
    """At the head of its stream it runs if `ready`; a kernel only with a place."""

    name: str
    order: int
    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    kernel: bool = False
    ended: Callable[[], bool] = lambda: True
    resident: bool = False


class FakeStream:
    def __init__(self, device: FakeDevice, number: int) -> None:
        self._device, self._number = device, number
        self.queue: deque[Op] = deque()
        self.pace = device.world.pace()

    @property
    def key(self) -> Hashable:
        return self._number

    def put(self, name: str, run: Callable[[], None], **more: Any) -> None:
        assert not self._device.captured, "enqueued while a graph was captured"
        self._device.launches += 1
        self.queue.append(Op(name, self._device.launches, run, **more))

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device.world.clock)
        self.put("record", event.reach)
        return event

    def wait(self, event: Any) -> None:
        self.put("wait", lambda: None, ready=lambda: event.done)

    def wait_work(self, work: Any) -> None:
        self.wait(work)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        assert into.numel() == source.numel()

        def move() -> None:
            into.copy_(source)

        self.put("copy", move)

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for into, source in pairs:
            self.copy(into, source)


class FakeDevice:
    """One rank's. places: kernels that fit on it at a time. connections: 1 makes one queue of all streams, in the
    order of launches, as CUDA_DEVICE_MAX_CONNECTIONS=1 does."""

    def __init__(self, world: World, rank: int, places: int, connections: int) -> None:
        self.world, self.rank, self.places, self.connections = world, rank, places, connections
        self.streams: list[FakeStream] = []
        self.launches = 0
        self.dead = self.captured = self.grouped = False
        self.training = self.create_stream()
        self.now_on: FakeStream = self.training

    def create_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self, len(self.streams)))
        return self.streams[-1]

    def get_current_stream(self) -> FakeStream:
        return self.now_on

    def allocate_buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xEE, dtype=torch.uint8)

    def is_capturing(self) -> bool:
        return self.captured

    def is_grouping(self) -> bool:
        return self.grouped

    @property
    def idle(self) -> bool:
        return not any(stream.queue for stream in self.streams)

    def actions(self) -> list[tuple[FakeStream, Callable[[], None]]]:
        """What may happen next, by stream."""
        if self.dead:
            return []
        free = self.places - sum(s.queue[0].resident for s in self.streams if s.queue)
        first = 0
        if self.connections == 1:
            first = min((op.order for s in self.streams for op in s.queue if not op.resident), default=0)
        found: list[tuple[FakeStream, Callable[[], None]]] = []
        for stream in self.streams:
            if not stream.queue:
                continue
            op = stream.queue[0]
            if op.kernel and op.ended():  # also one that was aborted before it began
                found.append((stream, partial(self._end, stream)))
            elif op.resident or (self.connections == 1 and op.order != first):
                continue
            elif op.kernel:
                if free > 0:
                    found.append((stream, partial(self._begin, op)))
            elif op.ready():
                found.append((stream, partial(self._run, stream)))
        return found

    @staticmethod
    def _end(stream: FakeStream) -> None:
        stream.queue.popleft()

    @staticmethod
    def _run(stream: FakeStream) -> None:
        stream.queue.popleft().run()

    @staticmethod
    def _begin(op: Op) -> None:
        op.resident = True
        op.run()


@dataclass(eq=False)
class Half:
    """One end of a message."""

    bytes: torch.Tensor
    resident: bool = False
    moved: bool = False


class FakeCommunicator:
    """One rank's handle; all handles of a world share `World.pairs`."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self.aborted = self.mute = False  # mute: forgets to enqueue, as a rank that went another way would

    def exchange(self, stream: Any, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if self.aborted:
            raise Broken("aborted")
        if self.mute:
            return
        halves = []
        for message in sends:
            halves.append(Half(message.bytes))
            self._world.pairs.setdefault((self._rank, message.peer), ([], []))[0].append(halves[-1])
        for message in receives:
            halves.append(Half(message.bytes))
            self._world.pairs.setdefault((message.peer, self._rank), ([], []))[1].append(halves[-1])

        def begin() -> None:
            for half in halves:
                half.resident = True

        def ended() -> bool:
            return self.aborted or all(half.moved for half in halves)

        stream.put("exchange", begin, kernel=True, ended=ended)

    def poll_error(self) -> str:
        return "aborted" if self.aborted else ""

    def abort(self) -> None:
        self.aborted = True


@dataclass
class Meeting:
    ranks: int
    here: int = 0


class World:
    """All devices, hosts and what they share. `pick(n)` chooses one of n possible things."""

    def __init__(
        self, ranks: int, seed: int, *, places: int = 1, connections: int = 8, eager_host: float = 0.5
    ) -> None:
        self.now = 0.0
        self._random, self._eager_host = random.Random(seed), eager_host
        self.devices = [FakeDevice(self, rank, places, connections) for rank in range(ranks)]
        self.communicators = [FakeCommunicator(self, rank) for rank in range(ranks)]
        self.hosts: dict[int, Generator[Callable[[], bool] | None, None, None]] = {}
        self.looks: list[Callable[[], None]] = []
        self.pairs: dict[tuple[int, int], tuple[list[Half], list[Half]]] = {}
        self._meetings: dict[Hashable, Meeting] = {}
        self._blocked: dict[int, Callable[[], bool]] = {}

    def clock(self) -> float:
        return self.now

    def pace(self) -> float:
        """How quick a new stream is."""
        return self._random.choice((0.02, 0.3, 1.0))

    def kill(self, rank: int) -> None:
        """The node is gone: neither its host nor its device does anything any more."""
        self.devices[rank].dead = True
        self.hosts.pop(rank, None)

    def collective(self, rank: int, stream: FakeStream, key: Hashable, ranks: int) -> None:
        """Enqueue this rank's part of a collective of the training."""
        meeting = self._meetings.setdefault(key, Meeting(ranks))

        def begin() -> None:
            meeting.here += 1

        stream.put(f"collective {key}", begin, kernel=True, ended=lambda: meeting.here == meeting.ranks)

    def run(self) -> None:
        """Until all hosts are at their ends and all queues are empty. Raises Deadlock."""
        idle = 0
        while True:
            hosts = [rank for rank in self.hosts if self._blocked.get(rank, lambda: True)()]
            actions = self._paced([a for device in self.devices for a in device.actions()]) + self._moves()
            if hosts and (not actions or self._random.random() < self._eager_host):
                self._advance(self._random.choice(hosts))
            elif actions:
                self._random.choice(actions)()
            elif not self.hosts and all(d.dead or d.idle for d in self.devices):
                return
            else:
                idle += 1
                if idle > _IDLE_LOOKS or not self.looks:
                    raise Deadlock(self.story())
                self.now += IDLE_S
                for look in self.looks:
                    look()
                continue
            idle = 0
            if self.looks and self._random.random() < 0.1:
                self._random.choice(self.looks)()

    def _paced(self, actions: list[tuple[FakeStream, Callable[[], None]]]) -> list[Callable[[], None]]:
        """Some streams are slow: those that are in time, or all if none is."""
        return [a for s, a in actions if self._random.random() < s.pace] or [a for _, a in actions]

    def _advance(self, rank: int) -> None:
        self._blocked.pop(rank, None)
        try:
            until = next(self.hosts[rank])
        except StopIteration:
            del self.hosts[rank]
            return
        if until is not None:
            self._blocked[rank] = until

    def _moves(self) -> list[Callable[[], None]]:
        """Messages of which both ends are there."""
        found: list[Callable[[], None]] = []
        for pair, (sends, receives) in self.pairs.items():
            for send, receive in zip(sends, receives, strict=False):
                if send.moved and receive.moved:
                    continue
                if send.resident and receive.resident and not any(self.communicators[r].aborted for r in pair):
                    found.append(partial(self._move, send, receive))
                break
        return found

    @staticmethod
    def _move(send: Half, receive: Half) -> None:
        assert send.bytes.numel() == receive.bytes.numel(), "the ends of a message differ in size"
        receive.bytes.copy_(send.bytes)
        send.moved = receive.moved = True

    def story(self) -> str:
        """What everyone waits for."""
        lines = []
        for device in self.devices:
            heads = [
                f"{s.key}: {s.queue[0].name}{' (runs)' if s.queue[0].resident else ''}"
                for s in device.streams
                if s.queue
            ]
            lines.append(f"rank {device.rank}: {'; '.join(heads) or 'idle'}")
        return "\n".join(lines)


@dataclass
class Heard:
    """A listener that remembers."""

    landings: list[tuple[int, int]] = field(default_factory=list)
    sendings: list[int] = field(default_factory=list)
    failures: list[tuple[int, bool]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    after_landing: Callable[[int, int], None] = lambda version, rank: None

    def on_measured(self, size: int, seconds: float) -> None:
        self.seconds.append(seconds)

    def on_sent(self, version: int) -> None:
        self.sendings.append(version)

    def on_landed(self, version: int, rank: int) -> None:
        self.landings.append((version, rank))
        self.after_landing(version, rank)

    def on_failed(self, version: int, drained: bool) -> None:
        self.failures.append((version, drained))
