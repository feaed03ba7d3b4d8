"""A home's side of a push over several connections."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import Iterator
from io import FileIO
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent.transfer import stripes
from gemini_hpc.agent.transfer.arrival import Arrival, Connection
from gemini_hpc.agent.transfer.push_sender import Channel, PushLost
from gemini_hpc.agent.transfer.stripes import Stripes
from gemini_hpc.core.digest import PIECE_BYTES, Pieces, digest_bytes
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.handshake import LinkSession
from gemini_hpc.wire.link import BlockingLink, LinkClosed

from .test_push_to_the_dead import channel, tcp_pair

USED = 16 * PIECE_BYTES + 5


def links() -> tuple[BlockingLink, BlockingLink]:
    near, far = tcp_pair()
    one, other = b"a" * 32, b"b" * 32
    near_link = BlockingLink(near, LinkSession(one, other, 0, "n2", "i", 0, "push", 7))
    far_link = BlockingLink(far, LinkSession(other, one, 0, "n1", "i", 0, "push", 7))
    for link in (near_link, far_link):
        link.limit_silence(5.0)
    return near_link, far_link


@pytest.fixture
def slot() -> Iterator[FileIO]:
    with FileIO(os.memfd_create("slot"), "r+") as file:
        file.write(random.Random(3).randbytes(USED))
        yield file


@pytest.fixture
def pairs() -> Iterator[list[tuple[BlockingLink, BlockingLink]]]:
    three = [links() for _ in range(3)]
    yield three
    for near, far in three:
        near.close()
        far.close()


@pytest.mark.parametrize(("cores", "ranks", "each"), [(1, 1, 1), (2, 1, 1), (4, 1, 2), (16, 1, 8), (64, 1, 8)])
def test_a_node_with_few_cores_has_few(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, each: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    assert stripes.compute_share(ranks) == each


def test_ranks_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert [stripes.compute_share(ranks) for ranks in (0, 1, 2, 3, 4, 8, 16)] == [8, 8, 4, 2, 2, 1, 1]


def test_all_bytes_arrive_and_all_are_acknowledged(
    slot: FileIO, pairs: list[tuple[BlockingLink, BlockingLink]]
) -> None:
    there = bytearray(USED)
    arrival = Arrival(memoryview(there), USED)

    def hold(far: BlockingLink) -> None:
        into = Connection(arrival, far, 5.0)
        while True:
            into.wait()
            if not far.sock.recv(1, socket.MSG_PEEK):
                return
            into.receive(far.receive(peer.PushChunk))

    threads = [threading.Thread(target=hold, args=(far,)) for _, far in pairs]
    for thread in threads:
        thread.start()
    sending = Stripes([near for near, _ in pairs], "test")
    sending.restart_counts()
    for start, end in ((0, 100), (100, 9 * PIECE_BYTES), (9 * PIECE_BYTES, USED)):
        sending.send(slot, start, end - start)
    total = 0
    while total < USED:
        for link in sending.lead.find_ready(sending.links, 5.0):
            total = sending.record_acknowledged(link, link.receive(peer.PushAck).arrived)
    sending.close()
    for thread in threads:
        thread.join(5)
    assert arrival.missing == 0 and arrival.pieces.compute_digest() == digest_bytes(there)
    assert bytes(there) == random.Random(3).randbytes(USED)


@pytest.mark.parametrize("arrived", [(0,), (11,), (10, 10), (5, 4)])
def test_acknowledgements_that_cannot_be(
    slot: FileIO, pairs: list[tuple[BlockingLink, BlockingLink]], arrived: tuple[int, ...]
) -> None:
    sending = Stripes([pairs[0][0]], "test")
    sending.send(slot, 0, 10)
    with pytest.raises(LinkClosed):
        for count in arrived:
            sending.record_acknowledged(sending.lead, count)
    sending.close()


def test_a_lost_connection_ends_all_and_the_rank_learns_it(
    slot: FileIO, pairs: list[tuple[BlockingLink, BlockingLink]]
) -> None:
    mesh: Any = SimpleNamespace(dead=set[str]())
    rank, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sending: Channel = asyncio.run(channel(mesh, agents))
    with rank, agents:
        rank.settimeout(5)
        sending._file, sending._used = slot, USED
        sending._use_links([near for near, _ in pairs])
        sending._send(100)
        assert pairs[0][1].receive(peer.PushChunk) == peer.PushChunk(0, 100)
        pairs[2][1].shut()
        assert isinstance(local.reply_decoder.decode(rank.recv(1 << 16)), local.Error)
        assert len(pairs[0][1].sock.recv(1 << 16)) == 100 and pairs[0][1].sock.recv(1) == b""
        assert pairs[1][1].sock.recv(1) == b""
        sending._forget_link()
    sending._file = None


@pytest.mark.parametrize("numbers", [(5, 3), (3, 3), (17,), (1 << 40,)])
def test_pieces_that_do_not_exist_are_not_sent(slot: FileIO, numbers: tuple[int, ...]) -> None:
    rank, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with rank, agents, pytest.raises(PushLost, match="do not exist"):
        asyncio.run(channel(SimpleNamespace(dead=set[str]()), agents))._send_again(numbers, Pieces(USED))


PLACE = peer.WriteWindow(peer.QueuePair(1, 2, 3, b"\0" * 16, 5), 0, 0)


@pytest.mark.parametrize("answer", [peer.PushAnswer(present=((5, 3),)), peer.PushAnswer(window=PLACE)])
def test_the_rank_learns_of_an_answer_that_cannot_be(answer: peer.PushAnswer) -> None:
    """It would wait for one for ever."""
    near, far = links()
    mesh = SimpleNamespace(dead=set[str]())
    rank, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sending: Channel = asyncio.run(channel(mesh, agents))
    with rank, agents, far.sock:
        rank.settimeout(5)
        sending._used = USED
        sending._use_links([near])
        sending._expect(peer.PushAnswer)
        far.send(answer)
        assert isinstance(local.reply_decoder.decode(rank.recv(1 << 16)), local.Error)
        sending._forget_link()
