"""What the scenarios of transport_scenarios.py are made of: a rank with its transport, versions, bounded waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.core.digest import digest as digest_of
from gemini_hpc.train.transport.base import Head, Inbox, LinkBroken, Outbox, Pending, Transport
from gemini_hpc.train.transport.landing import Landing

HANG_S = 20.0  # how long any one wait may take on a busy machine
_CANARY = 0xA5


@dataclass(frozen=True)
class Library:
    """make: collective, a new transport with these landing parts. enter: called first in each process. spoil: makes
    the outboxes of this process send heads of another protocol, until what it returns is called."""

    make: Callable[[Landing | None], Transport]
    enter: Callable[[], None] | None = None
    spoil: Callable[[], Callable[[], None]] | None = None


@dataclass
class Site:
    """What a scenario has on its rank."""

    rank: int
    world: int
    transport: Transport
    library: Library
    landing: Landing | None
    copying: Copying | None


@dataclass
class Copying:
    """The copies out of the landing parts: as fast or slow, and as successful, as the scenario wants."""

    go: threading.Event = field(default_factory=threading.Event)
    pause_s: float = 0.0
    fail_at: int = -1
    done: int = 0
    parts: set[int] = field(default_factory=set)

    def __call__(self, into: torch.Tensor, part: torch.Tensor) -> None:
        assert self.go.wait(HANG_S)
        time.sleep(self.pause_s)
        self.parts.add(part.data_ptr())
        if self.done == self.fail_at:
            raise MemoryError("no copy today")
        into.copy_(part)
        self.done += 1


def tell(rank: int) -> None:
    """Let `hear` on another rank return."""
    dist.send(torch.zeros(1), rank)


def hear(rank: int) -> None:
    dist.recv(torch.zeros(1), rank)


def content(seed: int, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=torch.uint8) if size else empty()


def empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def digest(data: torch.Tensor) -> str:
    return digest_of(data.numpy())


def send_version(box: Outbox, version: int, seed: int, sizes: list[int], ahead: int = 1) -> bool:
    """At most `ahead` chunks on their way at a time. Whether the other end took it."""
    used = sum(sizes)
    data = content(seed, used)
    if not box.offer(Head(version, used, used + 100, tuple(sizes))):
        return False
    pending: list[Pending] = []
    at = 0
    for size in sizes:
        if len(pending) == ahead:
            pending.pop(0).wait()
        pending.append(box.send(data[at : at + size]))
        at += size
    for one in pending:
        one.wait()
    box.finish(digest(data))
    return True


def receive_version(box: Inbox, version: int, seed: int, sizes: list[int], accept: bool = True) -> None:
    used = sum(sizes)
    assert box.next() == Head(version, used, used + 100, tuple(sizes))
    box.answer(accept)
    if not accept:
        return
    slot = torch.full((used + 128,), _CANARY, dtype=torch.uint8)
    box.receive(slot[64 : 64 + used])
    wanted = content(seed, used)
    assert torch.equal(slot[64 : 64 + used], wanted)
    assert all(int(b) == _CANARY for b in (*slot[:64], *slot[64 + used :]))
    assert box.digest() == digest(wanted)


class Doing(threading.Thread):
    """Something that blocks, in a thread, as the checkpointer does it; `result` bounds the wait for its end."""

    def __init__(self, what: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._what, self._value, self._error = what, None, None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._what()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(HANG_S)
        assert not self.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._value

    def breaks(self) -> str:
        """The reason that it gives."""
        try:
            value = self.result()
        except LinkBroken as error:
            return str(error)
        raise AssertionError(f"LinkBroken is wanted, {value!r} was returned")
