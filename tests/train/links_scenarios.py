"""Scenarios of a team of ranks for the links over gloo: each scenario has the same arguments on all of them.

What they assert here is the test's too. Rank 0 sends to rank 1, where nothing else is said.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from gemini_hpc.train.nccl import gloo_links
from gemini_hpc.train.nccl.gloo_links import GlooLinks, MessageInbox, MessageOutbox, Sent
from gemini_hpc.train.transport.base import Head, LinkBroken

HANG_S = 20.0  # how long any one wait may take on a busy machine
_CANARY = 0xA5


@dataclass
class Site:
    """The belongings of a scenario on its rank."""

    rank: int
    world: int
    links: GlooLinks


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
    return xxhash.xxh3_128(data.numpy()).hexdigest()


def send_version(box: MessageOutbox, version: int, seed: int, sizes: list[int], ahead: int = 1) -> bool:
    """At most `ahead` chunks on their way at a time. Whether the other end took it."""
    used = sum(sizes)
    data = content(seed, used)
    if not box.offer(Head(version, used, used + 100, tuple(sizes))):
        return False
    pending: list[Sent] = []
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


def receive_version(box: MessageInbox, version: int, seed: int, sizes: list[int], accept: bool = True) -> None:
    used = sum(sizes)
    assert box.receive_head() == Head(version, used, used + 100, tuple(sizes))
    box.answer(accept)
    if not accept:
        return
    slot = torch.full((used + 128,), _CANARY, dtype=torch.uint8)
    box.receive(slot[64 : 64 + used])
    wanted = content(seed, used)
    assert torch.equal(slot[64 : 64 + used], wanted)
    assert all(int(b) == _CANARY for b in (*slot[:64], *slot[64 + used :]))
    assert box.receive_digest() == digest(wanted)


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


def versions(site: Site, plan: list[dict[str, Any]]) -> None:
    """One version after the other, some refused, then goodbye."""
    if site.rank == 0:
        box = site.links.build_outbox(1)
        for number, v in enumerate(plan, 1):
            assert send_version(box, number, v["seed"], v["sizes"], v["ahead"]) == v["accept"]
        box.announce_end()
    elif site.rank == 1:
        inbox = site.links.build_inbox(0)
        for number, v in enumerate(plan, 1):
            receive_version(inbox, number, v["seed"], v["sizes"], v["accept"])
        assert inbox.receive_head() is None


def acknowledged(site: Site, size: int) -> list[float]:
    """Times (of one clock): when rank 0's waits returned; when rank 1 began to receive."""
    sizes = [size] * 3
    if site.rank == 0:
        box = site.links.build_outbox(1)
        data = content(5, size)
        assert box.offer(Head(1, 3 * size, 3 * size, tuple(sizes)))
        pending = [box.send(data) for _ in sizes]
        times = []
        for one in pending:
            one.wait()
            times.append(time.monotonic())
        data.fill_(0)
        box.finish("0" * 32)
        return times
    if site.rank == 1:
        inbox = site.links.build_inbox(0)
        assert inbox.receive_head() is not None
        inbox.answer(True)
        time.sleep(0.2)
        began = time.monotonic()
        into = torch.zeros(3 * size, dtype=torch.uint8)
        inbox.receive(into)
        inbox.receive_digest()
        assert torch.equal(into, content(5, size).repeat(3)), "changed after its acknowledgement"
        return [began]
    return []


def two_into_one(site: Site, count: int) -> None:
    """Ranks 0 and 2 send to rank 1 at the same time."""
    sizes = [700] * 20 + [1] * 5
    if site.rank == 1:
        boxes = {rank: site.links.build_inbox(rank) for rank in (0, 2)}

        def take(rank: int) -> None:
            for version in range(1, count + 1):
                receive_version(boxes[rank], version, 10 * version + rank, sizes)

        for one in [Doing(lambda rank=rank: take(rank)) for rank in boxes]:
            one.result()
    else:
        box = site.links.build_outbox(1)
        for version in range(1, count + 1):
            assert send_version(box, version, 10 * version + site.rank, sizes, ahead=4)


def ring(site: Site, count: int) -> None:
    """Every rank sends to the next one and receives from the one before."""
    to, since = (site.rank + 1) % site.world, (site.rank - 1) % site.world
    box, inbox = site.links.build_outbox(to), site.links.build_inbox(since)
    sizes = [1, 65_536, 0, 40_000, 7]

    def give() -> None:
        for version in range(1, count + 1):
            assert send_version(box, version, 100 * version + site.rank, sizes, 3) == (version % 3 != 0)
        box.announce_end()

    def take() -> None:
        for version in range(1, count + 1):
            receive_version(inbox, version, 100 * version + since, sizes, version % 3 != 0)
        assert inbox.receive_head() is None

    for one in [Doing(give), Doing(take)]:
        one.result()


def hostile(site: Site, head: list[Any] | None) -> str:
    """Rank 0 sends a head that is none (None: of another protocol): both ends hear of it."""
    if site.rank == 0:
        box = site.links.build_outbox(1)
        if head is None:
            good, gloo_links._MAGIC = gloo_links._MAGIC, b"GEMCHNK\x01"
            try:
                return Doing(lambda: box.offer(Head(1, 5, 5, (5,)))).breaks()
            finally:
                gloo_links._MAGIC = good
        return Doing(lambda: box.offer(Head(*head[:3], tuple(head[3])))).breaks()
    if site.rank == 1:
        inbox = site.links.build_inbox(0)
        reason = Doing(inbox.receive_head).breaks()
        assert Doing(inbox.receive_head).breaks() == reason, "a link that broke stays broken"
        return reason
    return ""


def wrong_chunk(site: Site) -> None:
    """A chunk that was not announced so is refused before anything of it goes; then all goes on."""
    if site.rank == 0:
        box = site.links.build_outbox(1)
        assert box.offer(Head(1, 5, 5, (2, 3)))
        for good, wrong in ((2, 3), (3, 2), (0, 0)):
            try:
                box.send(content(1, wrong))
            except ValueError as error:
                assert "announced" in str(error)
            else:
                raise AssertionError("sent")
            if good:
                box.send(content(good, good)).wait()
        box.finish("00" * 16)
    elif site.rank == 1:
        inbox = site.links.build_inbox(0)
        assert inbox.receive_head() is not None
        inbox.answer(True)
        into = torch.zeros(5, dtype=torch.uint8)
        inbox.receive(into)
        assert torch.equal(into, torch.cat([content(2, 2), content(3, 3)]))
        assert inbox.receive_digest() == "00" * 16


def interrupted(site: Site, waiting: str) -> None:
    """Rank 0 interrupts itself while a thread of it waits; rank 1, which is silent, interrupts itself too."""
    links = site.links
    if site.rank == 0:
        box, inbox = links.build_outbox(1), links.build_inbox(1)
        waits = {"next": inbox.receive_head, "offer": lambda: box.offer(Head(1, 9, 9, (9,)))}
        if waiting == "chunk":
            assert box.offer(Head(1, 9 << 20, 9 << 20, (9 << 20,)))
            waits["chunk"] = box.send(content(3, 9 << 20)).wait
        if waiting == "receive":
            assert inbox.receive_head() is not None
            inbox.answer(True)
            waits["receive"] = lambda: inbox.receive(torch.zeros(6000, dtype=torch.uint8))
        blocked = Doing(waits[waiting])
        time.sleep(0.1)
        assert blocked.is_alive()
        links.interrupt()
        blocked.breaks()
        links.interrupt()
        for call in (inbox.receive_head, lambda: box.offer(Head(1, 9, 9, (9,))), box.announce_end):
            Doing(call).breaks()
        tell(1)
    elif site.rank == 1:
        if waiting == "chunk":
            inbox = links.build_inbox(0)
            assert inbox.receive_head() is not None
            inbox.answer(True)
        if waiting == "receive":
            box = links.build_outbox(0)
            assert box.offer(Head(1, 6000, 6000, (3000, 3000)))
            box.send(content(4, 3000)).wait()
        hear(0)
        blocked = Doing(links.build_inbox(2).receive_head)
        time.sleep(0.05)
        links.interrupt()
        blocked.breaks()


def killed(site: Site, waiting: str) -> float:
    """Rank 1 is killed while rank 0 waits for it. Seconds until rank 0 knew."""
    links = site.links
    if site.rank == 1:
        inbox, box = links.build_inbox(0), links.build_outbox(0)
        if waiting in ("chunk", "digest"):
            assert inbox.receive_head() is not None
            inbox.answer(True)
        if waiting in ("receive", "digest"):
            assert box.offer(Head(1, 9, 9, (4, 5)))
            box.send(content(4, 4)).wait()
        tell(0)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    if site.rank != 0:
        return 0.0
    inbox, box = links.build_inbox(1), links.build_outbox(1)
    chunk = 9 << 20
    wait: Callable[[], Any] = inbox.receive_head
    if waiting == "offer":
        wait = lambda: box.offer(Head(1, chunk, chunk, (chunk,)))  # noqa: E731
    if waiting == "chunk":
        assert box.offer(Head(1, chunk, chunk, (chunk,)))
        wait = box.send(content(3, chunk)).wait
    if waiting == "receive":
        assert inbox.receive_head() is not None
        inbox.answer(True)
        wait = lambda: inbox.receive(torch.zeros(9, dtype=torch.uint8))  # noqa: E731
    blocked = Doing(wait)
    hear(1)
    began = time.monotonic()
    blocked.breaks()
    took = time.monotonic() - began
    Doing(inbox.receive_head).breaks()
    return took


def leaves(site: Site) -> None:
    """The process ends after this, with a thread that was blocked in a receive until just before."""
    inbox = site.links.build_inbox((site.rank - 1) % site.world)
    blocked = threading.Thread(target=lambda: _until_broken(inbox), daemon=True)
    blocked.start()
    time.sleep(0.1)
    assert blocked.is_alive()


def _until_broken(inbox: MessageInbox) -> None:
    try:
        inbox.receive_head()
    except LinkBroken:
        time.sleep(60)


SCENARIOS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        versions,
        acknowledged,
        two_into_one,
        ring,
        hostile,
        wrong_chunk,
        interrupted,
        killed,
        leaves,
    )
}
