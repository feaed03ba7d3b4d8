"""A push to a node that dies in the middle of a chunk."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from io import FileIO
from types import SimpleNamespace
from typing import Any

from gemini_hpc.agent.transfer import push_sender
from gemini_hpc.agent.transfer.push_sender import Channel, PushSender
from gemini_hpc.wire import grant_page
from gemini_hpc.wire.grant_page import GrantReader
from gemini_hpc.wire.handshake import LinkSession
from gemini_hpc.wire.link import BlockingLink

SIZE = 64 << 20  # more than the socket takes of a peer that reads nothing


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


async def channel(mesh: Any, sock: socket.socket) -> Channel:
    membership: Any = SimpleNamespace(incarnation=SimpleNamespace(mesh=mesh))
    nothing: Any = None
    shard: Any = SimpleNamespace(training="default", rank=0)
    sender = PushSender(membership, nothing, nothing, nothing, nothing)
    page = grant_page.make()
    try:
        return Channel(sender, nothing, shard, "n2", sock, GrantReader(page))
    finally:
        os.close(page)


def test_whoever_sends_to_it_is_free_as_soon_as_it_counts_as_dead() -> None:
    """And not only after the socket's time-out: a recovery round waits for it."""
    mesh = SimpleNamespace(dead=set[str]())
    rank, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near, far = tcp_pair()
    fd = os.memfd_create("slot")
    os.ftruncate(fd, SIZE)
    over: list[float] = []

    def send() -> None:
        try:
            while True:
                sending._send(SIZE)
        except OSError:
            over.append(time.monotonic())

    sending = asyncio.run(channel(mesh, agents))
    with rank, agents, far, FileIO(fd) as slot:
        sending._file, sending._used = slot, SIZE
        sending._use_links([BlockingLink(near, LinkSession(b"k" * 32, b"k" * 32, 0, "n2", "i", 0, "push", 7))])
        thread = threading.Thread(target=send)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive(), "the peer reads nothing, so the chunk cannot be sent"
        began = time.monotonic()
        mesh.dead.add("n2")
        thread.join(2 * push_sender.SILENCE_S)
        assert over and over[0] - began < push_sender.SILENCE_S / 2
        sending._forget_link()
