"""A device for a real training process: the streams of fake_device.py, run by a thread while the training goes on.

The training computes on the host, so its own stream is the host: a wait for a mark holds the process up. Everything
else is as in fake_device.py: what happens next on the other streams is chosen by a seed, few kernels fit at a time,
and a message is a kernel at either end that stays until both are there, so a wrong order hangs. Messages go over Unix
sockets. The collectives of the training are gloo's.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from gemini_hpc.train.device.interface import Broken, Communicator, Device, Message
from gemini_hpc.train.device.pins import Pin
from gemini_hpc.train.nccl import platform
from gemini_hpc.train.nccl.exchange import Links
from gemini_hpc.train.nccl.launch_log import EnqueuedOperation

from .fake_device import FakeDevice, FakeEvent, FakeStream, World

_HUNG_S = 20.0
_SIZE = 8


class _LiveWorld(World):
    def clock(self) -> float:
        return time.monotonic()


class _LiveStream(FakeStream):
    def put(self, name: str, run: Callable[[], None], **more: Any) -> None:
        with self._device.lock:  # type: ignore[attr-defined]
            super().put(name, run, **more)

    def wait_work(self, work: Any) -> None:
        if work is None:
            return
        try:
            done = work.get_future().done
        except RuntimeError:  # a work of gloo that tells nothing
            return
        self.put("follow", lambda: None, ready=done)


class _HostStream:
    """Does at once what it is given."""

    key: Hashable = "host"

    def record(self) -> FakeEvent:
        event = FakeEvent(time.monotonic)
        event.reach()
        return event

    def wait(self, event: Any) -> None:
        deadline = time.monotonic() + _HUNG_S
        while not event.done:
            if time.monotonic() > deadline:
                raise Broken("the training waits for ever")
            time.sleep(1e-4)

    def wait_work(self, work: Any) -> None:
        raise AssertionError("nobody follows onto the training's own stream")

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for into, source in pairs:
            into.copy_(source)


class LiveDevice(FakeDevice):
    """One process' device, with the thread that runs it."""

    def __init__(self, seed: int, places: int) -> None:
        self.lock = threading.RLock()
        super().__init__(_LiveWorld(0, seed), 0, places, 8)
        self._random = random.Random(seed)
        threading.Thread(target=self._go, name="fake-device", daemon=True).start()

    def create_stream(self) -> FakeStream:
        with self.lock:
            self.streams.append(_LiveStream(self, len(self.streams)))
        return self.streams[-1]

    def get_current_stream(self) -> Any:
        return _HostStream()

    def _go(self) -> None:
        while True:
            with self.lock:
                actions = self.actions()
                if actions:
                    self._random.choice(actions)[1]()
            if not actions or self._random.random() < 0.01:
                time.sleep(2e-4)


class SocketCommunicator:
    """One rank's. mute_after: forgets to enqueue after so many; rate: bytes per second of a link; 0: as fast as it
    goes."""

    def __init__(self, rank: int, links: Links, name: str, rate: float, mute_after: int) -> None:
        self._rate, self._left, self._aborted = rate, mute_after, False
        self._out: dict[int, socket.socket] = {}
        self._in: dict[int, socket.socket] = {}
        self.count = 0
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"\0{name}.{rank}")
        server.listen(16)
        server.settimeout(3.0)
        for peer in links.targets[rank]:
            self._out[peer] = self._dial(f"\0{name}.{peer}", rank)
        for _ in range(sum(len(links.list_sources(rank, q)) for q in range(len(links.targets[rank])))):
            sock, _ = server.accept()
            sock.settimeout(None)
            self._in[sock.recv(1)[0]] = sock
        server.close()

    @staticmethod
    def _dial(address: str, rank: int) -> socket.socket:
        deadline = time.monotonic() + 3.0
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(address)
                sock.sendall(bytes([rank]))
                return sock
            except OSError:
                sock.close()
                if time.monotonic() > deadline:
                    raise Broken("a rank is not there") from None
                time.sleep(0.005)

    def exchange(self, stream: Any, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if self._aborted:
            raise Broken("aborted")
        self.count += 1
        self._left -= 1
        if self._left < 0:
            return
        over: list[bool] = []
        wanted = len(sends) + len(receives)

        def begin() -> None:
            for message in sends:
                threading.Thread(target=self._send, args=(message, over), daemon=True).start()
            for message in receives:
                threading.Thread(target=self._receive, args=(message, over), daemon=True).start()

        stream.put("exchange", begin, kernel=True, ended=lambda: self._aborted or len(over) == wanted)

    def _send(self, message: Message, over: list[bool]) -> None:
        with suppress(OSError):  # a dead peer is silence, as it is to a kernel
            sock = self._out[message.peer]
            data = message.bytes.numpy().tobytes()
            sock.sendall(len(data).to_bytes(_SIZE, "little") + data)
            if sock.recv(1):
                over.append(True)

    def _receive(self, message: Message, over: list[bool]) -> None:
        with suppress(OSError):
            sock, size = self._in[message.peer], message.bytes.numel()
            if int.from_bytes(self._exactly(sock, _SIZE), "little") != size:
                os._exit(86)  # the ends of a message differ in size
            data = self._exactly(sock, size)
            if self._rate:
                time.sleep(size / self._rate)
            message.bytes.copy_(torch.frombuffer(data, dtype=torch.uint8))
            sock.sendall(b"+")
            over.append(True)

    @staticmethod
    def _exactly(sock: socket.socket, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            part = sock.recv(size - len(data))
            if not part:
                raise OSError("closed")
            data += part
        return data

    def poll_error(self) -> str:
        return "aborted" if self._aborted else ""

    def abort(self) -> None:
        self._aborted = True
        for sock in (*self._out.values(), *self._in.values()):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class FakePlatform:
    """What an option names happens on one rank only: {"refuse": 1} is a refusal of rank 1."""

    backend = "gloo"
    pinned = pins = 0  # now, and ever

    def __init__(self, options: dict[str, Any], rank: int) -> None:
        self._options, self._rank = options, rank
        self.communicator: SocketCommunicator | None = None

    def _here(self, name: str) -> bool:
        return bool(self._options.get(name, -1) == self._rank)

    def explain_refusal(self, tensors: Sequence[torch.Tensor]) -> str:
        assert tensors
        return "the test refuses" if self._here("refuse") else ""

    def create_unique_id(self) -> bytes:
        return f"gemini-gpu-{os.getpid()}-{time.monotonic_ns()}".encode()

    def find_device(self) -> Device:
        return LiveDevice(self._options.get("seed", 0) + self._rank, self._options.get("places", 1))

    def connect(self, device: Device, rank: int, links: Links, unique_id: bytes) -> Communicator:
        if self._here("no_connection"):
            raise Broken("the test has cut the cable")
        mute_after = self._options["mute_after"] if self._here("mute") else 1 << 30
        made = SocketCommunicator(rank, links, unique_id.decode(), self._options.get("rate", 0.0), mute_after)
        self.communicator = made
        return made

    def pin(self, memory: torch.Tensor) -> Pin:
        if self._here("unpinned"):
            raise RuntimeError("the test locks no memory")
        FakePlatform.pinned += 1
        FakePlatform.pins += 1
        return _Pin()


class _Pin:
    def release(self) -> None:
        FakePlatform.pinned -= 1


def install(options: dict[str, Any], rank: int) -> FakePlatform:
    """For checkpointers made from here on."""
    made = FakePlatform(options, rank)
    platform.make = lambda: cast(Any, made)
    return made


def stray(exchange: Any) -> None:
    """This rank has enqueued one more than the others, as far as its log knows."""
    exchange.log.add(EnqueuedOperation(1, 0, False, 0, 0, 0, 0, 1))
