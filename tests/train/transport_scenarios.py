"""What a team of ranks does to try a transport: each scenario has the same name and arguments on all of them.

What they assert here is the test's too. Rank 0 sends to rank 1, where nothing else is said.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gemini_hpc.train.transport.base import Head, Inbox, LinkBroken, Pending
from tests.train.transport_site import Doing, Site, content, digest, hear, receive_version, send_version, tell

if TYPE_CHECKING:
    from mpi4py import MPI


def versions(site: Site, plan: list[dict[str, Any]]) -> None:
    """One version after the other, some refused, then goodbye."""
    if site.rank == 0:
        box = site.transport.outbox(1)
        for number, v in enumerate(plan, 1):
            assert send_version(box, number, v["seed"], v["sizes"], v["ahead"]) == v["accept"]
        box.bye()
    elif site.rank == 1:
        inbox = site.transport.inbox(0)
        for number, v in enumerate(plan, 1):
            receive_version(inbox, number, v["seed"], v["sizes"], v["accept"])
        assert inbox.next() is None


def acknowledged(site: Site, size: int) -> list[float]:
    """Times (of one clock): when rank 0's waits returned; when rank 1 began to receive."""
    sizes = [size] * 3
    if site.rank == 0:
        box = site.transport.outbox(1)
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
        inbox = site.transport.inbox(0)
        assert inbox.next() is not None
        inbox.answer(True)
        time.sleep(0.2)
        began = time.monotonic()
        into = torch.zeros(3 * size, dtype=torch.uint8)
        inbox.receive(into)
        inbox.digest()
        assert torch.equal(into, content(5, size).repeat(3)), "changed after its acknowledgement"
        return [began]
    return []


def slow_copies(site: Site, chunks: int) -> int:
    """While no copy is made as many chunks come as there are parts; all of them in the end. How many parts."""
    sizes = [3000] * chunks
    data = content(6, 3000 * chunks)
    if site.rank == 0:
        box = site.transport.outbox(1)
        assert box.offer(Head(1, data.numel(), data.numel(), tuple(sizes)))
        p = site.landing.bytes // site.landing.part_bytes
        pending = [box.send(data[at : at + 3000]) for at in range(0, data.numel(), 3000)]
        for one in pending[:p]:
            one.wait()
        tell(1)
        for one in pending[p:]:
            one.wait()
        box.finish(digest(data))
    elif site.rank == 1:
        copying = site.copying
        copying.go.clear()
        copying.pause_s = 0.002
        inbox = site.transport.inbox(0)
        assert inbox.next() is not None
        inbox.answer(True)
        into = torch.zeros(data.numel(), dtype=torch.uint8)
        receiving = Doing(lambda: inbox.receive(into))
        hear(0)
        copying.go.set()
        receiving.result()
        assert inbox.digest() == digest(into)
        return len(copying.parts)
    return 0


def failed_copy(site: Site, p: int) -> str:
    """One of rank 0's copies fails at rank 1: both hear of it, and a link of rank 2 has all parts to itself."""
    sizes = [500] * 12
    if site.rank == 0:
        box = site.transport.outbox(1)
        reason = Doing(lambda: send_version(box, 1, 7, sizes, ahead=3)).breaks()
        assert Doing(lambda: send_version(box, 2, 7, sizes)).breaks() == reason
        tell(2)
        return reason
    if site.rank == 1:
        site.copying.fail_at = 4
        inbox = site.transport.inbox(0)
        assert inbox.next() is not None
        inbox.answer(True)
        into = torch.zeros(6000, dtype=torch.uint8)
        try:
            Doing(lambda: inbox.receive(into)).result()
        except MemoryError as error:
            assert str(error) == "no copy today"
        assert Doing(inbox.next).breaks()
        site.copying.fail_at = -1
        assert site.landing._free.qsize() == p
        receive_version(site.transport.inbox(2), 1, 8, sizes)
        return ""
    hear(0)
    send_version(site.transport.outbox(1), 1, 8, sizes, ahead=3)
    return ""


def two_into_one(site: Site, count: int) -> None:
    """Ranks 0 and 2 send to rank 1 at the same time, which has one landing for both."""
    sizes = [700] * 20 + [1] * 5
    if site.rank == 1:
        boxes = {rank: site.transport.inbox(rank) for rank in (0, 2)}

        def take(rank: int) -> None:
            for version in range(1, count + 1):
                receive_version(boxes[rank], version, 10 * version + rank, sizes)

        for one in [Doing(lambda rank=rank: take(rank)) for rank in boxes]:
            one.result()
    else:
        box = site.transport.outbox(1)
        for version in range(1, count + 1):
            assert send_version(box, version, 10 * version + site.rank, sizes, ahead=4)


def ring(site: Site, count: int) -> None:
    """Every rank sends to the next one and receives from the one before."""
    to, since = (site.rank + 1) % site.world, (site.rank - 1) % site.world
    box, inbox = site.transport.outbox(to), site.transport.inbox(since)
    sizes = [1, 65_536, 0, 40_000, 7]

    def give() -> None:
        for version in range(1, count + 1):
            assert send_version(box, version, 100 * version + site.rank, sizes, 3) == (version % 3 != 0)
        box.bye()

    def take() -> None:
        for version in range(1, count + 1):
            receive_version(inbox, version, 100 * version + since, sizes, version % 3 != 0)
        assert inbox.next() is None

    for one in [Doing(give), Doing(take)]:
        one.result()


def hostile(site: Site, head: list[Any] | None) -> str:
    """Rank 0 sends a head that is none (None: of another protocol): both ends hear of it."""
    if site.rank == 0:
        box = site.transport.outbox(1)
        if head is None:
            assert site.library.spoil is not None
            restore = site.library.spoil()
            try:
                return Doing(lambda: box.offer(Head(1, 5, 5, (5,)))).breaks()
            finally:
                restore()
        return Doing(lambda: box.offer(Head(*head[:3], tuple(head[3])))).breaks()
    if site.rank == 1:
        inbox = site.transport.inbox(0)
        reason = Doing(inbox.next).breaks()
        assert Doing(inbox.next).breaks() == reason, "a link that broke stays broken"
        return reason
    return ""


def wrong_chunk(site: Site) -> None:
    """A chunk that was not announced so is refused before anything of it goes; then all goes on."""
    if site.rank == 0:
        box = site.transport.outbox(1)
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
        inbox = site.transport.inbox(0)
        assert inbox.next() is not None
        inbox.answer(True)
        into = torch.zeros(5, dtype=torch.uint8)
        inbox.receive(into)
        assert torch.equal(into, torch.cat([content(2, 2), content(3, 3)]))
        assert inbox.digest() == "00" * 16


def interrupted(site: Site, waiting: str) -> None:
    """Rank 0 interrupts itself while a thread of it waits; rank 1, which is silent, interrupts itself too."""
    transport = site.transport
    if site.rank == 0:
        box, inbox = transport.outbox(1), transport.inbox(1)
        waits = {"next": inbox.next, "offer": lambda: box.offer(Head(1, 9, 9, (9,)))}
        if waiting == "chunk":
            assert box.offer(Head(1, 9 << 20, 9 << 20, (9 << 20,)))
            waits["chunk"] = box.send(content(3, 9 << 20)).wait
        if waiting == "receive":
            assert inbox.next() is not None
            inbox.answer(True)
            waits["receive"] = lambda: inbox.receive(torch.zeros(6000, dtype=torch.uint8))
        blocked = Doing(waits[waiting])
        time.sleep(0.1)
        assert blocked.is_alive()
        transport.interrupt()
        blocked.breaks()
        transport.interrupt()
        for call in (inbox.next, lambda: box.offer(Head(1, 9, 9, (9,))), box.bye):
            Doing(call).breaks()
        tell(1)
    elif site.rank == 1:
        if waiting == "chunk":
            inbox = transport.inbox(0)
            assert inbox.next() is not None
            inbox.answer(True)
        if waiting == "receive":
            box = transport.outbox(0)
            assert box.offer(Head(1, 6000, 6000, (3000, 3000)))
            box.send(content(4, 3000)).wait()
        hear(0)
        blocked = Doing(transport.inbox(2).next)
        time.sleep(0.05)
        transport.interrupt()
        blocked.breaks()


def killed(site: Site, waiting: str) -> float:
    """Rank 1 is killed while rank 0 waits for it. Seconds until rank 0 knew."""
    transport = site.transport
    if site.rank == 1:
        inbox, box = transport.inbox(0), transport.outbox(0)
        if waiting in ("chunk", "digest"):
            assert inbox.next() is not None
            inbox.answer(True)
        if waiting in ("receive", "digest"):
            assert box.offer(Head(1, 9, 9, (4, 5)))
            box.send(content(4, 4)).wait()
        tell(0)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    if site.rank != 0:
        return 0.0
    inbox, box = transport.inbox(1), transport.outbox(1)
    chunk = 9 << 20
    wait: Callable[[], Any] = inbox.next
    if waiting == "offer":
        wait = lambda: box.offer(Head(1, chunk, chunk, (chunk,)))  # noqa: E731
    if waiting == "chunk":
        assert box.offer(Head(1, chunk, chunk, (chunk,)))
        wait = box.send(content(3, chunk)).wait
    if waiting == "receive":
        assert inbox.next() is not None
        inbox.answer(True)
        wait = lambda: inbox.receive(torch.zeros(9, dtype=torch.uint8))  # noqa: E731
    blocked = Doing(wait)
    hear(1)
    began = time.monotonic()
    blocked.breaks()
    took = time.monotonic() - began
    Doing(inbox.next).breaks()
    return took


def leaves(site: Site) -> None:
    """The process ends after this, with a thread that was blocked in a receive until just before."""
    inbox = site.transport.inbox((site.rank - 1) % site.world)
    blocked = threading.Thread(target=lambda: _until_broken(inbox), daemon=True)
    blocked.start()
    time.sleep(0.1)
    assert blocked.is_alive()


def _until_broken(inbox: Inbox) -> None:
    try:
        inbox.next()
    except LinkBroken:
        time.sleep(60)


def mpi_refusals(site: Site) -> list[str]:
    """What is said of communicators and of an MPI that cannot be used. Collective; the same on all ranks."""
    from mpi4py import MPI

    from gemini_hpc.train.transport.mpi import MpiTransport

    def refusal(comm: MPI.Intracomm | None = None) -> str:
        try:
            MpiTransport(comm=comm)
        except ValueError as error:
            return str(error)
        raise AssertionError("not refused")

    said = [refusal(MPI.COMM_SELF)]
    query = MPI.Query_thread
    if site.rank == 1:
        MPI.Query_thread = lambda: MPI.THREAD_SERIALIZED
    said.append(refusal())
    MPI.Query_thread = query
    if site.rank == 1:
        sys.modules["mpi4py"], kept = None, sys.modules["mpi4py"]  # type: ignore[assignment]
    said.append(refusal())
    if site.rank == 1:
        sys.modules["mpi4py"] = kept
        sys.modules["mpi4py.MPI"], kept = None, sys.modules["mpi4py.MPI"]  # type: ignore[assignment]
    said.append(refusal())
    if site.rank == 1:
        sys.modules["mpi4py.MPI"] = kept

    class OfAnotherJob(MPI.Intracomm):
        """Its ranks are not those that they say."""

        def Get_rank(self) -> int:
            return (super().Get_rank() + 1) % self.size

    said.append(refusal(OfAnotherJob(MPI.COMM_WORLD)))
    backwards = MPI.COMM_WORLD.Split(0, site.world - MPI.COMM_WORLD.rank)
    assert MpiTransport(comm=backwards)._mpi_ranks != MpiTransport()._mpi_ranks
    return said


def throughput(site: Site, total_bytes: int, chunk_bytes: int, count: int) -> list[float]:
    """Seconds for each of `count` versions, at rank 0."""
    sizes = [chunk_bytes] * (total_bytes // chunk_bytes)
    data = torch.zeros(total_bytes, dtype=torch.uint8)
    times = []
    if site.rank == 0:
        box = site.transport.outbox(1)
        for version in range(count):
            began = time.monotonic()
            assert box.offer(Head(version, total_bytes, total_bytes, tuple(sizes)))
            pending: list[Pending] = []
            for at in range(0, total_bytes, chunk_bytes):
                if len(pending) == 4:
                    pending.pop(0).wait()
                pending.append(box.send(data[at : at + chunk_bytes]))
            for one in pending:
                one.wait()
            box.finish("0" * 32)
            times.append(time.monotonic() - began)
    elif site.rank == 1:
        inbox = site.transport.inbox(0)
        for _ in range(count):
            assert inbox.next() is not None
            inbox.answer(True)
            inbox.receive(data)
            inbox.digest()
    return times


SCENARIOS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        versions,
        acknowledged,
        slow_copies,
        failed_copy,
        two_into_one,
        ring,
        hostile,
        wrong_chunk,
        interrupted,
        killed,
        leaves,
        mpi_refusals,
        throughput,
    )
}
