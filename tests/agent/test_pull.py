"""A copy from its holders: what fails in the middle or is damaged comes from others, and nothing else twice."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from waiting import until

from gemini_hpc.agent.replicas.digest_pool import DigestPool
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.transfer import pull, pull_source
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.digest import PIECE_BYTES, digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import munge, peer
from gemini_hpc.wire.handshake import Caller, HandshakeClient
from gemini_hpc.wire.link import BlockingLink, LinkClosed, accept

from .test_push_bad_input import Site

USED = 40 * PIECE_BYTES + 12345  # three runs, the last piece short
DATA = random.Random(1).randbytes(USED)
COPY = Copy("default", 0, 1, 0, USED, USED, Stamp(1, 1), digest_bytes(DATA))


class Holder:
    """An agent's listener with one copy."""

    def __init__(self, holders: Holders, name: str, flipped: tuple[int, ...]) -> None:
        self.memory = holders.memory()
        with self.memory.view() as view:
            view[:] = DATA
            for at in flipped:
                view[at] ^= 1
        self.asked: list[peer.PullAsk] = []
        self.later = 0  # questions that are answered with "later"
        self.is_last = False  # serves only once a list of pieces has been asked for
        self.name, self.loop = name, holders.loop
        self.server = holders.run(asyncio.start_server(self._call, "127.0.0.1", 0))
        self._pool = holders.pool

    @property
    def source(self) -> pull.Source:
        port = self.server.sockets[0].getsockname()[1]
        caller = Caller("", "n0", "i")
        client = HandshakeClient(caller, purpose="pull", job=1, target=self.name, server_uid=os.geteuid())
        return pull.Source(self.name, "127.0.0.1", port, client, COPY.stamp)

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await accept(reader, writer, lambda _: "", host=self.name, read_restart=lambda: 0, instance="j")
        await pull_source.serve(link, self._pool, self._find)

    def _find(self, ask: peer.PullAsk) -> tuple[Copy, Memfd] | bool:
        self.asked.append(ask)
        self.is_last = self.is_last and not ask.bare
        if self.later or self.is_last:
            self.later = max(0, self.later - 1)
            return True
        return COPY, self.memory


class Holders:
    """Holders on a loop of their own."""

    def __init__(self) -> None:
        self.loop, self.pool, self.opened = asyncio.new_event_loop(), DigestPool(2), list[Memfd]()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.all: list[Holder] = []

    def run(self, work: object) -> asyncio.Server:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)  # type: ignore[arg-type]

    def memory(self) -> Memfd:
        self.opened.append(Memfd("gemini:test", USED))
        return self.opened[-1]

    def add(self, *flipped: int) -> Holder:
        self.all.append(Holder(self, f"n{len(self.all) + 1}", flipped))
        return self.all[-1]

    def fetch(
        self, connections: int = 1, *others: pull.Source, stop: Event | None = None
    ) -> tuple[pull.Pulled, bool]:
        """The result, and whether the bytes are right."""
        memory = self.memory()
        sources = [*others, *(holder.source for holder in self.all)]
        done = pull.fetch(COPY, memory, sources, stop or Event(), connections)
        with memory.view() as view:
            return done, view == DATA

    async def _ended(self) -> None:
        for holder in self.all:
            holder.server.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._ended(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.pool.close()
        for memory in self.opened:
            memory.close()


@pytest.fixture
def holders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holders]:
    monkeypatch.setattr(munge, "encode", lambda payload, *, for_uid: payload)
    monkeypatch.setattr(munge, "decode", lambda credential: (credential, os.geteuid(), 0))
    holders = Holders()
    yield holders
    holders.close()


def _dies_after(monkeypatch: pytest.MonkeyPatch, size: int, *holders: Holder) -> None:
    """These holders die once they have sent so many raw bytes, on whichever connections."""
    send_file, left, lock = BlockingLink.send_file, size, threading.Lock()
    victims = {os.fstat(holder.memory.fd).st_ino for holder in holders}

    def dying(link: BlockingLink, fd: int, offset: int, length: int) -> None:
        nonlocal left
        now = length
        if os.fstat(fd).st_ino in victims:
            with lock:
                now = min(length, left)
                left -= now
        send_file(link, fd, offset, now)
        if now < length:
            raise OSError("dead")

    monkeypatch.setattr(BlockingLink, "send_file", dying)


@pytest.mark.parametrize("connections", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 3])
def test_a_copy_comes_once(holders: Holders, count: int, connections: int) -> None:
    for _ in range(count):
        holders.add()
    done, is_right = holders.fetch(connections)
    assert is_right and not done.failures
    assert done.bytes == USED, "no byte comes twice"


def test_all_holders_serve_at_once(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    first = threading.Barrier(3)  # no holder sends before each has been asked
    send_file, seen = BlockingLink.send_file, set[int]()

    def together(link: BlockingLink, fd: int, offset: int, length: int) -> None:
        if id(link) not in seen:
            seen.add(id(link))
            first.wait(10)
        send_file(link, fd, offset, length)

    monkeypatch.setattr(BlockingLink, "send_file", together)
    for _ in range(3):
        holders.add()
    done, is_right = holders.fetch()
    assert is_right and done.hosts == ("n1", "n2", "n3") and done.bytes == USED


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("size", [0, PIECE_BYTES // 2, 7 * PIECE_BYTES + 5, USED - 1])
def test_a_source_that_dies_in_the_middle(
    holders: Holders, monkeypatch: pytest.MonkeyPatch, size: int, connections: int
) -> None:
    first, second = holders.add(), holders.add()
    second.later = 2
    _dies_after(monkeypatch, size, first)
    done, is_right = holders.fetch(connections)
    assert is_right and "n2" in done.hosts
    assert done.bytes < USED + connections * PIECE_BYTES, "at most a piece a connection comes twice"
    if size < PIECE_BYTES:
        assert done.hosts == ("n2",)


def test_all_sources_die(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    _dies_after(monkeypatch, USED - 1, holders.add(), holders.add())
    with pytest.raises(pull.PullFailed, match=r"n1: .*n2: |n2: .*n1: "):
        holders.fetch()


def test_one_flipped_piece(holders: Holders) -> None:
    holders.add(3 * PIECE_BYTES + 7)
    holders.add().is_last = True
    done, is_right = holders.fetch()
    assert is_right and done.failures == "n1: damaged pieces: 1" and done.hosts == ("n1", "n2")
    assert done.bytes == USED + PIECE_BYTES, "only the damaged piece comes again"


def test_a_flipped_byte_of_the_last_piece(holders: Holders) -> None:
    holders.add(USED - 1, 0)
    holders.add().is_last = True
    done, is_right = holders.fetch()
    assert is_right and done.failures == "n1: damaged pieces: 2"
    assert done.bytes == USED + PIECE_BYTES + USED % PIECE_BYTES


def test_damage_on_the_way(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only holder's copy is right: its list tells which piece to send again."""
    holders.add()
    fill, flips = BlockingLink.fill, [PIECE_BYTES]

    def flipping(link: BlockingLink, view: memoryview, silent_s: float, take: object) -> None:
        def damaged(data: memoryview) -> None:
            if flips and flips.pop():
                data[0] ^= 1
            take(data)  # type: ignore[operator]

        fill(link, view, silent_s, damaged)

    monkeypatch.setattr(BlockingLink, "fill", flipping)
    done, is_right = holders.fetch()
    assert is_right and not done.failures and done.bytes == USED + PIECE_BYTES


def test_damage_on_the_way_for_ever(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    holders.add()
    fill = BlockingLink.fill

    def flipping(link: BlockingLink, view: memoryview, silent_s: float, take: object) -> None:
        def damaged(data: memoryview) -> None:
            data[0] ^= 1
            take(data)  # type: ignore[operator]

        fill(link, view, silent_s, damaged)

    monkeypatch.setattr(BlockingLink, "fill", flipping)
    with pytest.raises(pull.PullFailed, match="n1: damaged pieces"):
        holders.fetch()


def test_nobody_has_a_right_copy(holders: Holders) -> None:
    holders.add(5)
    holders.add(5)
    with pytest.raises(pull.PullFailed, match=r"damaged copy.*damaged copy"):
        holders.fetch()


def test_another_copy_than_planned_and_no_listener(holders: Holders) -> None:
    first = holders.add()
    first._find = lambda ask: (Copy("default", 0, 1, 0, 5, 5, Stamp(1, 1), digest_bytes(b"12345")), first.memory)  # type: ignore[method-assign]
    holders.add()
    deaf = holders.add()
    source = deaf.source
    holders.all.remove(deaf)
    holders.loop.call_soon_threadsafe(deaf.server.close)
    done, is_right = holders.fetch(1, source)
    assert is_right and done.hosts == ("n2",) and done.bytes == USED
    assert "n1: " in done.failures


def test_a_copy_that_is_on_its_way_to_its_source(holders: Holders) -> None:
    holders.add().later = 3
    done, is_right = holders.fetch(4)
    assert is_right and not done.failures and done.bytes == USED
    assert len(holders.all[0].asked) > 3


def test_stopped(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, send_file = Event(), BlockingLink.send_file

    def stopping(link: BlockingLink, fd: int, offset: int, length: int) -> None:
        send_file(link, fd, offset, length // 2)
        stop.set()
        send_file(link, fd, offset + length // 2, length - length // 2)

    monkeypatch.setattr(BlockingLink, "send_file", stopping)
    holders.add()
    with pytest.raises(pull.PullFailed, match="cancelled"):
        holders.fetch(stop=stop)


def test_query_server_that_cannot_be(holders: Holders) -> None:
    source = holders.add().source
    for start, end in ((5, 5), (0, USED + 1), (9, 8)):
        link = BlockingLink.connect("127.0.0.1", source.port, holders.all[0].source.client)
        link.send(peer.PullAsk("default", 0, Stamp(1, 1), False, start, end))
        head = link.receive(peer.PullHead)
        assert head.copy is None and "bytes" in head.reason
        link.close()
    link = BlockingLink.connect("127.0.0.1", source.port, holders.all[0].source.client)
    link.send(peer.PullAsk("default", 0, Stamp(1, 1), False, 0, 1, bare=True))
    assert link.receive(peer.PullHead).copy == COPY
    link.send(peer.PullAsk("default", 1, Stamp(1, 1), False, 0, 1))  # another copy
    with pytest.raises(LinkClosed):
        link.receive(peer.PullHead)
    link.close()


@pytest.mark.slow
def test_a_replacement_pulls_all_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From real agents: n4 takes the place of n3, and has what n3 held."""
    monkeypatch.setattr(munge, "encode", lambda payload, *, for_uid: payload)
    monkeypatch.setattr(munge, "decode", lambda credential: (credential, os.geteuid(), 0))
    site = Site(tmp_path / "job")
    try:
        stamp = (site.ranks[0].epoch, site.version)
        site.job.requeue(["n1", "n2", "n4"])
        new = site.job.all["n4"]
        until(lambda: all(stamp in site.job.held(new, rank) for rank in (1, 2)), what="the copies of two ranks")
    finally:
        site.close()
