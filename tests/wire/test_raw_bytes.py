"""Raw bytes between frames, over TCP: all of them arrive, or the receiver says why not, in bounded time."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_hpc.wire import peer
from gemini_hpc.wire.handshake import LinkSession
from gemini_hpc.wire.link import WAKE_BYTES, BlockingLink, LinkClosed

SILENT_S = 0.4
Beside = Callable[[Callable[[], object]], None]


class Ends(NamedTuple):
    """Of one connection."""

    sender: BlockingLink
    receiver: BlockingLink


def pair() -> Ends:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname(), timeout=5)
        there, _ = server.accept()
    one, other = b"a" * 32, b"b" * 32
    sender = BlockingLink(here, LinkSession(one, other, 0, "n1", "i", 0, "push", 1))
    receiver = BlockingLink(there, LinkSession(other, one, 0, "n2", "i", 0, "push", 1))
    for link in (sender, receiver):
        link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.limit_silence(5.0)
    return Ends(sender, receiver)


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = pair()
    yield both
    for link in both:
        link.close()


@pytest.fixture
def beside() -> Iterator[Beside]:
    """Runs something in a thread, which is over when the test is."""
    threads = []

    def start(work: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def content(length: int) -> bytes:
    return random.Random(length).randbytes(length)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.sampled_from([1, 2, 4095, WAKE_BYTES - 1, WAKE_BYTES, WAKE_BYTES + 1, 3 * WAKE_BYTES + 7]), min_size=1
    )
)
def test_chunks_and_their_headers_from_a_file(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    ends = pair()
    file = tmp_path_factory.mktemp("slot") / "bytes"
    data = content(sum(lengths))
    file.write_bytes(data)
    fd = os.open(file, os.O_RDONLY)

    def send() -> None:
        at = 0
        for length in lengths:
            ends.sender.send(peer.PushChunk(at, length), more=True)
            ends.sender.send_file(fd, at, length)
            at += length

    thread = threading.Thread(target=send)
    thread.start()
    try:
        got = bytearray(len(data))
        at = 0
        for length in lengths:
            assert ends.receiver.receive(peer.PushChunk) == peer.PushChunk(at, length)
            with memoryview(got)[at : at + length] as part:
                ends.receiver.fill(part, 5.0)
            at += length
        assert bytes(got) == data
    finally:
        thread.join(10)
        os.close(fd)
        for link in ends:
            link.close()


def test_no_byte_beyond_its_own_is_taken(ends: Ends) -> None:
    ends.sender.sock.sendall(b"x" * 100)
    ends.sender.send(peer.PushAck(7))
    ends.receiver.fill(memoryview(bytearray(100)), SILENT_S)
    assert ends.receiver.receive(peer.PushAck) == peer.PushAck(7)


def test_a_frame_after_many_bytes_wakes_its_reader(ends: Ends, beside: Beside) -> None:
    """What was asked of the socket for raw bytes does not outlive them."""
    beside(lambda: ends.sender.sock.sendall(b"x" * (WAKE_BYTES + 5)))
    ends.receiver.fill(memoryview(bytearray(WAKE_BYTES + 5)), 5.0)
    ends.sender.send(peer.PushAck(7))
    assert ends.receiver.wait(5.0)
    assert ends.receiver.receive(peer.PushAck) == peer.PushAck(7)


@pytest.mark.parametrize("sent", [0, 1, WAKE_BYTES - 1, WAKE_BYTES + 1])
def test_who_sends_no_more_is_silent(ends: Ends, sent: int) -> None:
    ends.sender.sock.sendall(b"x" * sent)
    began = time.monotonic()
    with pytest.raises(LinkClosed, match=f"silent after {sent} of"):
        ends.receiver.fill(memoryview(bytearray(2 * WAKE_BYTES)), SILENT_S)
    assert time.monotonic() - began < 10 * SILENT_S


def test_few_bytes_at_a_time_are_not_silence(ends: Ends, beside: Beside) -> None:
    def drip() -> None:
        for _ in range(10):
            ends.sender.sock.sendall(b"x" * 1000)
            time.sleep(0.25)

    beside(drip)
    ends.receiver.fill(memoryview(bytearray(10_000)), 1.0)


@pytest.mark.parametrize("sent", [0, 1, WAKE_BYTES + 1])
def test_a_closed_connection_is_no_silence(ends: Ends, sent: int) -> None:
    ends.sender.sock.sendall(b"x" * sent)
    ends.sender.close()
    with pytest.raises(LinkClosed, match="closed after"):
        ends.receiver.fill(memoryview(bytearray(2 * WAKE_BYTES)), 5.0)


def test_shut_by_another_thread(ends: Ends, beside: Beside) -> None:
    def shut() -> None:
        time.sleep(0.1)
        ends.receiver.shut()

    beside(shut)
    with pytest.raises(LinkClosed, match="closed after"):
        ends.receiver.fill(memoryview(bytearray(100)), 5.0)


def test_a_file_that_is_too_short(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 10)
    with (tmp_path / "short").open("rb") as file, pytest.raises(OSError, match="ends too early"):
        ends.sender.send_file(file.fileno(), 0, 11)


def test_a_receiver_that_is_gone(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(16 << 20))
    ends.receiver.close()
    with (tmp_path / "bytes").open("rb") as file, pytest.raises((BrokenPipeError, ConnectionResetError)):
        ends.sender.send_file(file.fileno(), 0, 16 << 20)
